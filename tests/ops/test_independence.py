"""Implementations don't import each other, directly or through another module, and never stand in for each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tra
from tests.ops.compare import exact_inputs
from tra.ops import api, choice

PACKAGE = Path(tra.__file__).parent
TRITON = (
    "availability", "backward", "backward_kernels", "block_shapes", "decode", "decode_kernels", "decode_plan",
    "direct_launch", "eager", "forward", "forward_kernel", "kernel_parts", "launch", "projection_kernels",
    "projection_launch", "projections",
)  # fmt: skip
FAMILIES = {
    "reference": {"tra.ops.reference"},
    "blockwise": {"tra.ops.blockwise", "tra.ops.block_layout"},
    "newest-first": {"tra.ops.newest_first"},
    "triton": {f"tra.ops.triton.{name}" for name in TRITON},
}
SHARED = {"tra.ops.triton.availability"}  # `choice` reads it, and no kernel


def path_of(module: str) -> Path | None:
    base = PACKAGE.parent.joinpath(*module.split("."))
    return next((x for x in (base.with_suffix(".py"), base / "__init__.py") if x.exists()), None)


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, lazily or not. Importing a name from a package counts as both."""
    path = path_of(module)
    assert path is not None, module
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if path_of(name) else str(node.module) for name in names]
        found |= {name for name in names if name.split(".")[0] == "tra" and path_of(name)}
    return found


def reachable(modules: set[str]) -> set[str]:
    found, todo = set(modules), list(modules)
    while todo:
        new = imports(todo.pop()) - found
        found |= new
        todo += new
    return found


def test_importing_the_operator_imports_no_compiler() -> None:
    """It would take longer than all the rest, and settings of Triton are read when it is imported."""
    code = "import sys, tra.ops; print([name for name in ('torch._dynamo', 'triton') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_reaches_another(family: str) -> None:
    others = set().union(*(modules for name, modules in FAMILIES.items() if name != family)) - SHARED
    assert not reachable(FAMILIES[family]) & others


def test_families_are_complete() -> None:
    """A module that is new in `triton/` belongs to the family, or is named here."""
    files = {f"tra.ops.triton.{path.stem}" for path in (PACKAGE / "ops/triton").glob("*.py")} - {
        "tra.ops.triton.__init__"
    }
    assert files - FAMILIES["triton"] == {"tra.ops.triton.cross_entropy_kernel"}
    assert {row.implementation for row in choice.AUTO} == set(FAMILIES)


def test_the_table_in_words_is_the_table_in_code() -> None:
    """`README.md` has every row, in order."""
    lines = (PACKAGE / "ops/README.md").read_text().splitlines()
    for table in (choice.AUTO, choice.WITHIN_TRITON):
        rows = [f"| {row.implementation} | {row.condition} |" for row in table]
        start = lines.index(rows[0])
        assert lines[start : start + len(rows)] == rows
        assert not lines[start + len(rows)].startswith("|")


CALLS = {
    # queries, keys, options: implementation
    "short": ((1, 512), {"score_bound": 8.0}, "reference"),
    "few queries": ((16, 513), {"score_bound": 8.0}, "newest-first"),
    "many queries": ((17, 513), {"score_bound": 8.0}, "blockwise"),
    "no promise": ((1, 513), {}, "blockwise"),
    "full walk": ((1, 513), {"score_bound": 8.0, "tolerance": 0.0}, "blockwise"),
    "dropout": ((1, 513), {"score_bound": 8.0, "dropout": 0.1}, "blockwise"),
    "gradients": ((1, 513), {"score_bound": 8.0}, "blockwise"),
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("impl", ["auto", "reference", "blockwise"])
def test_which_implementation_takes_a_call(case: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU. A named one takes every call itself."""
    (n_queries, n_keys), options, expected = CALLS[case]
    called: list[str] = []
    for name, original in api.IN_PYTORCH.items():
        spy = lambda *args, _name=name, _original=original: called.append(_name) or _original(*args)  # noqa: E731
        monkeypatch.setitem(api.IN_PYTORCH, name, spy)
    inputs = exact_inputs(0, batch=1, n_queries=n_queries, n_keys=n_keys)
    with torch.set_grad_enabled(case == "gradients"):
        tra.threshold_relative_attention(*inputs, impl=impl, scale=0.0625, **options)
    assert called == [expected if impl == "auto" else impl]
