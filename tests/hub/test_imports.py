"""transformers is needed by its classes alone."""

from __future__ import annotations

from tests.test_imports import PACKAGE, imported


def test_transformers_is_imported_in_the_hub_alone() -> None:
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "hub" not in path.parents:
            names = {name.split(".")[0] for name in imported(path)}
            assert not names & {"transformers", "accelerate", "lm_eval"}, path


def test_the_core_does_not_know_the_hub() -> None:
    for path in PACKAGE.rglob("*.py"):
        if not {PACKAGE / "hub", PACKAGE / "cli"} & {*path.parents}:
            assert not [name for name in imported(path) if name.startswith("tra.hub")], path
