"""Curves and tables of a section as the page's script draws them: columns of numbers, and the words that go with them.

A line has `x`, `y`, `low`, `high` and `text`. The band is the range of seeds; with one seed it is the 95 % interval,
over test sequences or documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tra.report._names import FAILURES
from tra.report.page.groups import Group, Section
from tra.report.page.read import PageRun, Row
from tra.runs import exact_text, mean_over_heads

MOST_POINTS = 250
"""Of a training curve."""

MEASURES = FAILURES | {
    "kept": "share of keys kept",
    "null": "share of queries that keep no key",
    "reach": "reach, tokens",
}
TRAINING = {"loss": "training loss", "exact": "sequences without an error", "accuracy": "right symbols"}


class Level(NamedTuple):
    """What the runs of a group reach on one test set."""

    mean: float
    low: float
    high: float
    text: str
    runs: int


class Split(NamedTuple):
    """A test set, and the length that the page shows it at."""

    name: str
    length: int
    label: str


def exact_match(group: Group, split: str) -> Level | None:
    """Mean over seeds of the share of sequences without an error."""
    rows = [row for run in group.runs for row in _of_split(run.evaluation, split)]
    if not rows:
        return None
    if len(rows) == 1:
        return Level(rows[0]["exact"], rows[0]["low"], rows[0]["high"], exact_text(rows[0]), 1)
    return _level([row["exact"] for row in rows], lambda x: f"{x:.3f}")


def perplexity(group: Group, text: str, overlap: str, window: int) -> Level | None:
    """Geometric mean over seeds."""
    rows = [row for run in group.runs for row in run.perplexity if _is(row, text, overlap, window)]
    if not rows:
        return None
    if len(rows) == 1:
        middle = rows[0]["perplexity"]
        low, high = rows[0].get("low"), rows[0].get("high")
        if low is None or high is None:
            return Level(middle, middle, middle, f"{middle:.1f}", 1)
        return Level(middle, low, high, f"{middle:.1f} ({low:.1f}-{high:.1f})", 1)
    losses = [row["loss"] for row in rows]
    level = _level([row["perplexity"] for row in rows], lambda x: f"{x:.1f}")
    mean = math.exp(sum(losses) / len(losses))
    return level._replace(mean=mean, text=f"{mean:.1f} ({level.low:.1f}-{level.high:.1f})")


def failure(measure: str, group: Group, split: str) -> Level | None:
    """Mean over layers, heads and seeds of a measure of diagnose.jsonl."""
    rows = [row for run in group.runs for row in _of_split(run.diagnosis, split)]
    values = [value for row in rows if (value := _mean_over_heads(row.get(measure))) is not None]
    return _level(values, lambda x: f"{x:,.0f}" if measure == "reach" else f"{x:.3f}") if values else None


def splits_of(runs: Iterable[PageRun], rows_of: Callable[[PageRun], Sequence[Row]]) -> list[Split]:
    """By length; at the same length `iid` first, then as they come."""
    found: dict[str, Split] = {}
    for run in runs:
        for row in rows_of(run):
            found.setdefault(row["split"], Split(row["split"], int(row["longest"]), _span(row)))
    return sorted(found.values(), key=lambda each: (each.length, each.name != "iid"))


def texts(section: Section) -> list[tuple[str, str]]:
    """Texts and overlaps that perplexity was measured on."""
    return list(dict.fromkeys((row["text"], row["overlap"]) for run in section.runs for row in run.perplexity))


def windows(runs: Iterable[PageRun], text: str, overlap: str) -> list[int]:
    return sorted({int(row["window"]) for run in runs for row in run.perplexity if _is(row, text, overlap)})


def charts(section: Section) -> list[dict[str, Any]]:
    """All curves of a section; those of length first."""
    found: list[dict[str, Any]] = []
    trained = section.trained_length
    sets = splits_of(section.runs, lambda run: run.evaluation)
    if sets:
        lines = _length_lines(section, sets, exact_match)
        one = {"name": "exact", "title": "sequences without an error", "unit": True, "log": False, "lines": lines}
        found.append(_chart("length", "Exact match by length", "length of the input", trained, [one]))
    for text, overlap in texts(section):
        lines = []
        for number, group in enumerate(section.groups):
            here = windows(group.runs, text, overlap)
            levels = [(window, f"window {window:,}", perplexity(group, text, overlap, window)) for window in here]
            lines += _line(number, levels)
        one = {"name": "perplexity", "title": "perplexity", "unit": False, "log": True, "lines": lines}
        title = f"Perplexity by window: {overlap_text(text, overlap)}"
        found.append(_chart("perplexity", title, "window, tokens", trained, [one]))
    for name, text_splits in _diagnosed(section).items():
        measures = []
        for measure, title in MEASURES.items():
            lines = _length_lines(section, text_splits, partial(failure, measure))
            if lines:
                unit, log = measure != "reach", measure == "reach"
                measures.append({"name": measure, "title": title, "unit": unit, "log": log, "lines": lines})
        if measures:
            title = f"The failures of attention by length{f': {name}' if name else ''}"
            found.append(_chart("failures", title, "length of the input", trained, measures))
    measures = []
    for measure, title in TRAINING.items():
        lines = [line for number, group in enumerate(section.groups) for line in _training_line(number, group, measure)]
        if any(value for line in lines for value in line["y"]):
            one = {"name": measure, "title": title, "unit": measure != "loss", "log": measure == "loss", "lines": lines}
            measures.append(one)
    if measures:
        found.append(_chart("training", "Training", "step", None, measures, log_x=False))
    return found


def overlap_text(text: str, overlap: str) -> str:
    return f"{text}, {'windows side by side' if overlap == 'none' else f'windows that overlap by {overlap}'}"


def _chart(
    kind: str, title: str, x_title: str, trained: int | None, measures: list[dict[str, Any]], log_x: bool = True
) -> dict[str, Any]:
    shown = [x for measure in measures for line in measure["lines"] for x in line["x"]]
    spans = bool(shown) and min(shown) > 0 and max(shown) >= 8 * min(shown)
    return {
        "kind": kind,
        "title": title,
        "x_title": x_title,
        "x_log": log_x and spans,
        "trained": trained,
        "measures": measures,
    }


def _length_lines(
    section: Section, sets: Sequence[Split], level_of: Callable[[Group, str], Level | None]
) -> list[dict[str, Any]]:
    """A line through the first test set of every length; others of the same length are points beside it."""
    first = {each.length: each for each in reversed(sets)}
    lines = []
    for number, group in enumerate(section.groups):
        for alone in (False, True):
            chosen = [each for each in sets if (first[each.length] != each) == alone]
            levels = [(each.length, f"{each.name}, length {each.label}", level_of(group, each.name)) for each in chosen]
            lines += _line(number, levels, alone)
    return lines


def _line(number: int, levels: Sequence[tuple[int, str, Level | None]], alone: bool = False) -> list[dict[str, Any]]:
    shown = [(x, where, level) for x, where, level in levels if level is not None]
    if not shown:
        return []
    return [
        {
            "group": number,
            "alone": alone,
            "several": max(level.runs for _, _, level in shown) > 1,
            "x": [x for x, _, _ in shown],
            "y": [_short(level.mean) for _, _, level in shown],
            "low": [_short(level.low) for _, _, level in shown],
            "high": [_short(level.high) for _, _, level in shown],
            "text": [f"{where}\n{level.text}{_seeds(level.runs)}" for _, where, level in shown],
        }
    ]


def _training_line(number: int, group: Group, measure: str) -> list[dict[str, Any]]:
    by_step: dict[int, list[float]] = {}
    for run in group.runs:
        for row in run.metrics:
            value = row.get(measure)
            if isinstance(value, int | float) and math.isfinite(value):
                by_step.setdefault(int(row["step"]), []).append(value)
    steps = sorted(by_step)
    if not steps:
        return []
    every = max(1, math.ceil(len(steps) / MOST_POINTS))
    steps = sorted({*steps[::every], steps[-1]})
    levels = [(step, f"step {step:,}", _level(by_step[step], lambda x: f"{x:.4g}")) for step in steps]
    return _line(number, levels)


def _diagnosed(section: Section) -> dict[str, list[Split]]:
    """Test sets with a diagnosis; those of language models by text, as their splits read text/window."""
    found: dict[str, list[Split]] = {}
    for each in splits_of(section.runs, lambda run: run.diagnosis):
        found.setdefault(each.name.rsplit("/", 1)[0] if section.task == "text" else "", []).append(each)
    return found


def _level(values: Sequence[float], text: Callable[[float], str]) -> Level:
    mean, low, high = sum(values) / len(values), min(values), max(values)
    words = text(mean) if text(low) == text(high) else f"{text(mean)} ({text(low)}-{text(high)})"
    return Level(mean, low, high, words, len(values))


def _seeds(runs: int) -> str:
    return f"\nmean and range of {runs} seeds" if runs > 1 else ""


def _of_split(rows: Sequence[Row], split: str) -> list[Row]:
    """The last row of a split: the newest."""
    return [row for row in rows if row["split"] == split][-1:]


def _span(row: Row) -> str:
    """`1,024`, or `51-100` where lengths vary."""
    return "-".join(f"{length:,}" for length in dict.fromkeys((row["shortest"], row["longest"])))


def _is(row: Row, text: str, overlap: str, window: int | None = None) -> bool:
    return (row["text"], row["overlap"]) == (text, overlap) and window in (None, row["window"])


def _mean_over_heads(measure: Any) -> float | None:
    try:
        mean = mean_over_heads(measure)
    except TypeError:  # damaged: not numbers by layer and head
        return None
    return mean if mean is not None and math.isfinite(mean) else None


def _short(value: float) -> float:
    return float(f"{value:.6g}")
