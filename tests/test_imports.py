"""Dependencies point one way, and the core needs little."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import slow

PACKAGE = Path(__file__).parent.parent / "tra"
CORE = ("training.trainer", *slow("ops", "attention", "model", "tasks"))  # it imports the others
LAYERS = ("ops", "attention", "model")


def imported(path: Path) -> set[str]:
    """Absolute names of all imports in a file, lazy ones included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files(part: str) -> list[Path]:
    single = PACKAGE / f"{part}.py"
    return [single] if single.exists() else sorted((PACKAGE / part).rglob("*.py"))


@pytest.mark.parametrize("part", CORE)
def test_the_core_needs_only_torch_numpy_safetensors(part: str) -> None:
    """Really imported, in a process of its own, with everything else out of reach."""
    banned = ("tyro", "rich", "matplotlib", "transformers", "ray", "plotly")
    blocks = "; ".join(f"sys.modules[{name!r}] = None" for name in banned)
    subprocess.run([sys.executable, "-c", f"import sys; {blocks}; import tra.{part}"], check=True)


@pytest.mark.parametrize(("lower", "upper"), [("ops", "attention"), ("ops", "model"), ("attention", "model")])
def test_lower_layers_do_not_know_the_upper(lower: str, upper: str) -> None:
    for path in files(lower):
        assert not [name for name in imported(path) if name.startswith(f"tra.{upper}")], path


@pytest.mark.parametrize("part", ["tasks", "report"])
def test_tasks_and_report_do_not_know_the_model(part: str) -> None:
    for path in files(part):
        assert not [
            n
            for n in imported(path)
            if n.startswith(("tra.model", "tra.attention", "tra.training.trainer", "tra.runs.folder"))
        ], path
