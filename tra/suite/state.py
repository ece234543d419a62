"""Read from a cell's folder how far it has come, and record failures there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tra.attention import MECHANISMS
from tra.evaluation.exact_match import chosen_splits
from tra.evaluation.perplexity import windows_that_fit
from tra.runs import RunFolder, read_rows, write_atomically
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
    """The measurements that a trained run still lacks: splits to evaluate and to diagnose, and windows of the text."""

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
    return run.config_file.is_file() and run.weights_file.is_file() and missing(run).nothing and _has_weights(run)


def _has_weights(run: RunFolder) -> bool:
    """Return whether the weights are intact and fit the config. Files that have not changed are read once."""
    facts = run.weights_file.stat()
    key = facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns
    if key not in _intact:
        try:
            run.read_weights()
        except ValueError:
            return False
        _intact.add(key)
    return True


_intact: set[tuple[int, int, int, int]] = set()  # files of weights that were read and found intact


def state(folder: Path) -> State:
    """Return how far a cell has come."""
    run = RunFolder(folder)
    rows = read_rows(run.metrics_file)
    step = _last_step(run, rows)
    if is_done(folder):
        return State("done", step)
    if (failure := read_failure(folder)) is not None:
        return State("failed", step, failure["last_lines"])
    return State("cut off" if rows or run.weights_file.is_file() else "waiting", step)


def _last_step(run: RunFolder, rows: list[dict[str, Any]]) -> int:
    step = rows[-1].get("step") if rows else 0
    if not isinstance(step, int):
        raise ValueError(f"{run.metrics_file} is damaged: its last row has no step")
    return step


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
    try:
        failure: dict[str, Any] = json.loads(file.read_bytes())
        return {"status": failure["status"], "last_lines": str(failure["last_lines"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{file} is damaged: it must hold a status and last_lines") from None


def clear_failure(folder: Path) -> None:
    """Delete the record of a failure."""
    (folder / "failed.json").unlink(missing_ok=True)
