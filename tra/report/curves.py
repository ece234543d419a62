"""Compute what figures, tables and the page show of runs that differ in seed alone: means, and ranges or intervals.

A range goes from the lowest to the highest seed. With one seed it is the 95 % interval, over test sequences or over
documents, where there is one. A test set is shown at its longest sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tra.report.runs import EvaluatedRun, Row
from tra.runs import exact_digits, is_finite, mean_over_heads, perplexity_ratio

Runs = Sequence[EvaluatedRun]


class Level(NamedTuple):
    """The mean of runs at one point, and its range."""

    mean: float
    low: float
    high: float
    runs: int
    form: str
    """How the numbers are written: a format."""

    @property
    def text(self) -> str:
        """`0.824 (0.807-0.840)`, or the mean alone where there is no range."""
        mean, low, high = (format(value, self.form) for value in self[:3])
        return mean if low == high else f"{mean} ({low}-{high})"


class Curve(NamedTuple):
    """Levels at lengths, windows or steps."""

    x: list[int]
    levels: list[Level]

    @property
    def middle(self) -> list[float]:
        return [level.mean for level in self.levels]

    @property
    def low(self) -> list[float]:
        return [level.low for level in self.levels]

    @property
    def high(self) -> list[float]:
        return [level.high for level in self.levels]


class Split(NamedTuple):
    """A test set."""

    name: str
    length: int
    label: str
    """Its lengths, in words."""


def exact_match(runs: Runs, split: str) -> Level | None:
    """Return the share of sequences without an error, a mean over seeds."""
    rows = [row for run in runs for row in newest(run.evaluation, split)]
    if len(rows) == 1:
        form = f".{exact_digits(rows[0].get('examples', 0))}f"
        return Level(rows[0]["exact"], rows[0]["low"], rows[0]["high"], 1, form)
    return _level([row["exact"] for row in rows], ".3f")


def perplexity(runs: Runs, text: str, overlap: str, window: int) -> Level | None:
    """Return the perplexity of a text, a geometric mean over seeds."""
    rows = [row for run in runs for row in perplexity_rows(run, text, overlap, window)]
    if len(rows) == 1:
        mean: float = rows[0]["perplexity"]
        low, high = rows[0].get("low"), rows[0].get("high")  # None where there is one document
        return Level(mean, mean if low is None else low, mean if high is None else high, 1, ".1f")
    level = _level([row["perplexity"] for row in rows], ".1f")
    return level and level._replace(mean=math.exp(sum(row["loss"] for row in rows) / len(rows)))


def diagnosis(measure: str, runs: Runs, split: str, layer: int | None = None) -> Level | None:
    """Return a measure of diagnose.jsonl, a mean over layers (or of one layer), heads and seeds."""
    rows = [row for run in runs for row in newest(run.diagnosis, split)]
    means = [_mean_over_heads(row.get(measure), layer) for row in rows]
    return _level([mean for mean in means if mean is not None], ",.0f" if measure == "reach" else ".3f")


def splits_of(runs: Runs, diagnosed: bool = False) -> list[Split]:
    """Return test sets by length, those that were evaluated or diagnosed; at one length `iid` first, as it is easiest.

    The others of one length stand in the order in which they were evaluated.
    """
    found: dict[str, Split] = {}
    for run in runs:
        for row in run.diagnosis if diagnosed else run.evaluation:
            lengths = dict.fromkeys((row.get("shortest", row["longest"]), row["longest"]))
            label = "-".join(f"{length:,}" for length in lengths)
            found.setdefault(row["split"], Split(row["split"], int(row["longest"]), label))
    return sorted(found.values(), key=lambda split: (split.length, split.name != "iid"))


def first_of_length(splits: Iterable[Split]) -> list[Split]:
    """Return the first test set of every length, which a curve goes through."""
    return list({split.length: split for split in reversed(list(splits))}.values())[::-1]


def curve_by_length(runs: Runs, splits: Iterable[Split], level_of: Callable[[Runs, str], Level | None]) -> Curve:
    """Return levels against length, where there are any."""
    return curve_of((split.length, level_of(runs, split.name)) for split in first_of_length(splits))


def curve_of(points: Iterable[tuple[int, Level | None]]) -> Curve:
    """Return the points that have a level as a curve."""
    found = [(x, level) for x, level in points if level is not None]
    return Curve([x for x, _ in found], [level for _, level in found])


def texts_of(runs: Runs) -> list[tuple[str, str]]:
    """Return the texts and overlaps whose perplexity was measured."""
    return list(dict.fromkeys((row["text"], row["overlap"]) for run in runs for row in run.perplexity))


def perplexity_rows(run: EvaluatedRun, text: str, overlap: str, window: int) -> list[Row]:
    wanted = (text, overlap, window)
    return [row for row in run.perplexity if (row["text"], row["overlap"], row["window"]) == wanted]


def windows_of(runs: Runs, text: str, overlap: str) -> list[int]:
    rows = (row for run in runs for row in run.perplexity)
    return sorted({int(row["window"]) for row in rows if (row["text"], row["overlap"]) == (text, overlap)})


def perplexity_curve(runs: Runs, text: str, overlap: str = "none") -> Curve:
    """Return perplexity against window."""
    windows = windows_of(runs, text, overlap)
    return curve_of((window, perplexity(runs, text, overlap, window)) for window in windows)


def ratio_of(
    run: EvaluatedRun, window: int, other: EvaluatedRun, other_window: int, text: str, overlap: str = "none"
) -> Level | None:
    """Return one perplexity of a text over another, paired by document; None where they have not the same documents."""
    documents, others = _documents(run, text, overlap, window), _documents(other, text, overlap, other_window)
    if documents is None or others is None or not np.array_equal(documents[:, 1], others[:, 1]):
        return None
    return Level(*perplexity_ratio(documents, others), 1, ".3f")


def _documents(run: EvaluatedRun, text: str, overlap: str, window: int) -> npt.NDArray[np.float64] | None:
    """Return loss and tokens of each document, `[N, 2]`, or None where they weren't kept."""
    rows = perplexity_rows(run, text, overlap, window)
    try:
        found = np.array(rows[-1]["by_document"] if rows else None, dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        return None
    if found.ndim != 2 or found.shape[1] != 2:
        return None
    found = found[found[:, 1] > 0]
    return found if len(found) > 1 else None


def training_curve(runs: Runs, measure: str = "loss") -> Curve:
    """Return a measure of training against steps: a mean over seeds, of losses a geometric one.

    Shown are the steps that all seeds logged; a step that some lack would make the mean jump.
    """
    is_loss = measure == "loss"
    seeds = []
    for run in runs:
        shown: dict[int, float] = {
            int(row["step"]): row[measure]
            for row in run.metrics
            if is_finite(row.get(measure)) and (row[measure] > 0 or not is_loss)
        }
        seeds += [shown] if shown else []
    if not seeds:
        return Curve([], [])
    steps = set.intersection(*map(set, seeds)) or set.union(*map(set, seeds))
    return curve_of(
        (step, _level([values[step] for values in seeds if step in values], ".4g", geometric=is_loss))
        for step in sorted(steps)
    )


def _level(values: Sequence[float], form: str, geometric: bool = False) -> Level | None:
    if not values:
        return None
    mean = math.exp(sum(map(math.log, values)) / len(values)) if geometric else sum(values) / len(values)
    return Level(mean, min(values), max(values), len(values), form)


def newest(rows: Sequence[Row], split: str) -> list[Row]:
    """Return the last row of a test set, if there is one."""
    return [row for row in rows if row["split"] == split][-1:]


def _mean_over_heads(measure: Any, layer: int | None) -> float | None:
    try:
        mean = mean_over_heads(measure if layer is None or not measure else measure[layer : layer + 1])
    except TypeError:  # damaged: not numbers by layer and head
        return None
    return mean if mean is not None and math.isfinite(mean) else None
