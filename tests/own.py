"""The examples of your own mechanism, task and suite, and runs of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tra.runs.extensions
from tra.attention import MECHANISMS
from tra.cli.main import parse
from tra.tasks import TASKS

EXAMPLES = Path(__file__).parents[1] / "examples"
MECHANISM, TASK, SUITE = (EXAMPLES / f"own_{name}.py" for name in ("mechanism", "task", "suite"))
IMPORTS = ("--import", str(MECHANISM), "--import", str(TASK))
TINY = (
    *("model.d_model=16", "model.n_heads=2", "model.n_layers=1", "model.arguments.window=3"),
    *("train.batch_size=4", "train.steps=4", "train.log_every=2", "train.checkpoint_every=2", "train.compile=off"),
    *('evaluate.splits=["2x"]', "evaluate.examples=4", "evaluate.examples_of={}", "task.arguments.length=4"),
)


def command(*arguments: str | Path) -> int:
    """Run `tra` in this process, with no user's file imported before."""
    forget()
    return parse([*map(str, arguments)])()


def forget() -> None:
    """Forget all imported files of users."""
    tra.runs.extensions._files.clear()
    for registry in (MECHANISMS, TASKS):
        for name in [name for name in registry if ".py:" in name]:
            del registry[name]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    forget()


def train(folder: Path, mechanism: Path = MECHANISM, *options: str) -> None:
    names = (f"model.mechanism={mechanism}:Windowed", f"task.name={TASK}:Reverse")
    assert command("train", "--preset", "copy-quick", *names, *TINY, "--out", folder, "--device", "cpu", *options) == 0
