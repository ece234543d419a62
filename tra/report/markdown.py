"""Write the tables and pages that a folder's README.md is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tra.report.runs import EvaluatedRun

TEACHER_FORCED = (
    "Every symbol is predicted from the right ones before it (teacher-forced). A sequence without an error is one that "
    "greedy generation gets right too; for shares of symbols that doesn't hold."
)
"""The meaning of exact match, for below its tables."""


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a table."""
    return [_row(header), "|" + "---|" * len(header), *map(_row, rows)]


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def grid(corner: str, columns: Sequence[Any], rows: dict[str, dict[Any, str]], form: str = ",") -> list[str]:
    """Return a table of cells by row and column, empty where there is none, without rows that have none.

    `form` is the format of the numbers over the columns.
    """
    filled = [[name, *(cells.get(column, "") for column in columns)] for name, cells in rows.items() if cells]
    return table([corner, *(format(column, form) for column in columns)], filled)


def facts_table(
    names: Sequence[str], runs: Sequence[EvaluatedRun], facts: dict[str, Callable[[EvaluatedRun], Any]]
) -> list[str]:
    """Return a table with a column per run: its steps, then these facts, then where it was made."""
    every: dict[str, Callable[[EvaluatedRun], Any]] = {
        "steps": lambda run: f"{run.metrics[-1]['step']:,}",
        **facts,
        "device": lambda run: run.environment["device"],
        "torch": lambda run: run.environment["torch"],
        "commit": lambda run: run.environment["commit"],
        "command": lambda run: f"`{run.command}`",
    }
    return table(["run", *names], [[fact, *map(of, runs)] for fact, of in every.items()])


def read_notes(folder: Path) -> str:
    """Return notes.md of a folder, which people write and README.md takes in; empty if there is none."""
    file = folder / "notes.md"
    return file.read_text() if file.is_file() else ""
