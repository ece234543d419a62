"""Find runs that broke down in training: their loss ended far above its best, so their results say little.

Only metrics.jsonl is read. The best and the last loss are means over a fiftieth of the log's lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tra.report.names import name_of
from tra.report.runs import EvaluatedRun

LOST = 0.25
"""Share of the loss's fall, from the first line of the log to the best, that a run which broke down has lost again."""

MIN_LINES = 4
"""Fewest lines of a log in which a breakdown can be found."""

MARK = "†"


class Breakdown(NamedTuple):
    """A run whose loss rose again."""

    best: float
    best_step: int
    last: float

    @property
    def text(self) -> str:
        return f"training loss {self.best:.2g} around step {self.best_step:,}, {self.last:.2g} at the end"


def breakdown(run: EvaluatedRun) -> Breakdown | None:
    """Return how a run broke down; None if it didn't."""
    losses = [(row["step"], float(row.get("loss") or math.nan)) for row in run.metrics]
    finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    if len(finite) < MIN_LINES:
        return None
    width = max(1, len(finite) // 50)
    means = [sum(loss for _, loss in finite[at : at + width]) / width for at in range(len(finite) - width + 1)]
    at = min(range(len(means)), key=means.__getitem__)
    best, last, first = means[at], means[-1], finite[0][1]
    if last - best <= LOST * (first - best):
        return None
    return Breakdown(best, finite[at + width // 2][0], last)


def mark(runs: Iterable[EvaluatedRun]) -> str:
    """Return ` †` to follow the name of runs if one of them broke down, else an empty text."""
    return f" {MARK}" if any(breakdown(run) for run in runs) else ""


def marks(runs: Iterable[EvaluatedRun]) -> dict[str, str]:
    """Return the mark of each variant that has one."""
    return {run.variant: f" {MARK}" for run in runs if breakdown(run)}


def footnotes(runs: Sequence[EvaluatedRun]) -> list[str]:
    """Return a sentence about every run that broke down."""
    found = [(run, fallen) for run in runs if (fallen := breakdown(run))]
    return [f"{MARK} {name_of(run.variant)}, seed {run.seed}, broke down: {fallen.text}." for run, fallen in found]
