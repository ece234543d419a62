"""Read from a cell's folder how far it has come, and record failures there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tra.attention import MECHANISMS
from tra.evaluation.exact_match import chosen_splits
from tra.evaluation.perplexity import windows_that_fit
from tra.runs import RunFolder, read_json, read_rows, write_atomically
from tra.text.task import Text

LOG_LINES = 5
"""Last lines of the log that are recorded with a failure."""

Status = Literal["done", "failed", "cut off", "waiting"]


class State(NamedTuple):
    """How far a cell has come."""

    status: Status
    step: int
    last_lines: str = ""
    """Last lines of a failed cell's log."""


class Missing(NamedTuple):
    """What is left to measure of a trained run: splits to evaluate and to diagnose, and windows of the text."""

    splits: list[str]
    diagnoses: list[str]
    windows: list[int]

    @property
    def nothing(self) -> bool:
        return not (self.splits or self.diagnoses or self.windows)


def missing(run: RunFolder) -> Missing:
    """Return what a run's config asks for and its files don't have."""
    config = run.config()
    task = config.task.build()
    if isinstance(task, Text):
        stream = task.stream("valid")
        rows = read_rows(run.perplexity_file, ("text", "window", "overlap"))
        measured = {row["window"] for row in rows if (row["text"], row["overlap"]) == (stream.name, "none")}
        windows = config.evaluate.windows or windows_that_fit(stream)
        return Missing([], [], [window for window in windows if window not in measured])
    splits = list(chosen_splits(task, config.evaluate))
    evaluated, diagnosed = (
        {row["split"] for row in read_rows(file, ("split",))} for file in (run.evaluation_file, run.diagnosis_file)
    )
    has_attention = not MECHANISMS[config.model.mechanism].replaces_mlp
    return Missing(
        [split for split in splits if split not in evaluated],
        [split for split in splits if split not in diagnosed] if has_attention else [],
        [],
    )


def is_done(folder: Path) -> bool:
    """Return whether a cell is trained, and measured in everything its config asks for."""
    run = RunFolder(folder)
    return run.config_file.is_file() and run.weights_file.is_file() and missing(run).nothing


def state(folder: Path) -> State:
    """Return how far a cell has come."""
    run = RunFolder(folder)
    rows = read_rows(run.metrics_file, ("step",))
    step = int(rows[-1]["step"]) if rows else 0
    if is_done(folder):
        return State("done", step)
    if (failure := read_failure(folder)) is not None:
        return State("failed", step, failure["last_lines"])
    return State("cut off" if rows or run.weights_file.is_file() else "waiting", step)


def record_failure(folder: Path, status: int) -> str:
    """Write failed.json with the last lines of the log, and return them."""
    log = folder / "log.txt"
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    last = "\n".join(lines[-LOG_LINES:])
    write_atomically(folder / "failed.json", json.dumps({"status": status, "last_lines": last}) + "\n")
    return last


def read_failure(folder: Path) -> dict[str, Any] | None:
    """Return what `record_failure` wrote, if it did."""
    file = folder / "failed.json"
    if not file.is_file():
        return None
    failure = read_json(file, dict)
    if not isinstance(failure.get("last_lines"), str):
        raise ValueError(f"{file} is damaged: it has no last_lines")
    return failure


def clear_failure(folder: Path) -> None:
    """Delete the record of a failure."""
    (folder / "failed.json").unlink(missing_ok=True)
