"""Dependencies point one way, nobody reads another package's private names, and the core needs little."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.slow import slow

PACKAGE = Path(__file__).parent.parent / "tra"

ALLOWED = {
    "ops": "",
    "tasks": "",
    "runs": "",
    "attention": "ops",
    "generation": "ops attention",
    "model": "ops attention generation",
    "text": "tasks runs",
    "config": "attention model tasks text runs",
    "presets": "model tasks text config",
    "training": "ops attention model tasks text config runs",
    "evaluation": "ops attention model tasks text config runs training",
    "report": "tasks text runs",
    "suite": "attention model tasks text config presets runs training evaluation",
    "bench": "ops attention model generation tasks text config presets runs training",
    "hub": "ops attention model tasks text config runs training report",
    "cli": "ops attention model generation tasks text config presets runs training evaluation report suite bench hub",
}
"""What each entry at the top of the package may import, lazily or not. Every one may import `tra` itself."""

LATER = {"runs": "attention config model tasks training"}
"""What an entry may import inside a function only: opening a run needs torch, reading its files does not."""


class Import(NamedTuple):
    """One imported name."""

    target: str  # absolute, such as tra.ops.api.attention_map
    lazy: bool  # inside a function


def files(part: str = "") -> list[Path]:
    single = PACKAGE / f"{part}.py"
    return [single] if part and single.exists() else sorted((PACKAGE / part).rglob("*.py"))


def imports(path: Path) -> Iterator[Import]:
    """Yield the imports of a file, without those that only a type checker sees."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from (Import(f"{child.module}.{alias.name}", lazy) for alias in child.names)
            else:
                yield from visit(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from visit(ast.parse(path.read_text()), False)


def imported(path: Path) -> set[str]:
    """Return the absolute names of all imports in a file, lazy ones included."""
    return {found.target for found in imports(path)}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def entry(name: str) -> str | None:
    """Return the entry at the top of the package that a name belongs to."""
    parts = name.split(".")
    return parts[1] if parts[0] == "tra" and len(parts) > 1 and parts[1] in ALLOWED else None


def test_every_entry_has_its_layer() -> None:
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert names - {"__init__", "__main__"} == set(ALLOWED)


@pytest.mark.parametrize("part", ALLOWED)
def test_dependencies_point_one_way(part: str) -> None:
    for path in files(part):
        for found in imports(path):
            other = entry(found.target)
            allowed = {part, *ALLOWED[part].split(), *(LATER.get(part, "").split() if found.lazy else ())}
            assert other is None or other in allowed, f"{module_name(path)} imports {found.target}"


def test_no_module_needs_itself() -> None:
    """What is imported while a module loads has no cycles."""
    modules = {module_name(path): path for path in files()}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        targets = {found.target for found in imports(path) if not found.lazy}
        known = {target if target in modules else target.rpartition(".")[0] for target in targets}
        # a package that re-exports its own modules is no cycle: they never import it back by name
        graph[name] = {other for other in known if other in modules and other != name and other != "tra"}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_private_names_stay_in_their_package() -> None:
    """A module or name with an underscore is for the folder it lies in."""
    for path in files():
        folder = module_name(path.parent / "__init__.py")
        for found in imports(path):
            parts = found.target.split(".")
            private = [place for place, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
            if parts[0] == "tra" and private:
                owner = ".".join(parts[: private[0]])
                owner = owner if (PACKAGE.parent / owner.replace(".", "/")).is_dir() else owner.rpartition(".")[0]
                assert owner == folder, f"{module_name(path)} imports {found.target}"


def test_transformers_is_imported_in_the_hub_alone() -> None:
    for path in files():
        if PACKAGE / "hub" not in path.parents:
            names = {name.split(".")[0] for name in imported(path)}
            assert not names & {"transformers", "accelerate", "lm_eval"}, path


CORE = ("training.start", *slow("ops", "attention", "model", "tasks"))  # the first imports the others


@pytest.mark.parametrize("part", CORE)
def test_the_core_needs_only_torch_numpy_safetensors(part: str) -> None:
    """Really imported, in a process of its own, with everything else out of reach."""
    banned = ("rich", "matplotlib", "transformers", "ray", "plotly", "PIL")
    run_python(f"{without(*banned)}; import tra.{part}")


@pytest.mark.parametrize("part", ["runs", "report.runs"])
def test_reading_runs_needs_no_torch(part: str) -> None:
    run_python(f"{without('torch')}; import tra.{part}")


def test_importing_the_package_loads_nothing_else() -> None:
    """Names load when they are used, and bring what they need alone."""
    run_python("import sys, tra; assert 'torch' not in sys.modules; assert 'tra.ops' not in sys.modules")
    run_python("import sys, tra; tra.threshold_relative_attention; assert 'tra.attention' not in sys.modules")
    code = "import sys, tra; tra.Decoder; loaded = {name.split('.')[1] for name in sys.modules if name[:4] == 'tra.'}"
    run_python(f"{code}; assert loaded == {{'ops', 'attention', 'model', 'generation'}}, loaded")


def without(*modules: str) -> str:
    return "import sys; " + "; ".join(f"sys.modules[{name!r}] = None" for name in modules)


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
