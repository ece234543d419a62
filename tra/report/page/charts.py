"""Turn curves into what the page's script draws: columns of numbers, and the words that go with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tra.report import curves
from tra.report.curves import Curve, Level, Runs, Split
from tra.report.groups import Section
from tra.report.names import FAILURES, overlap_text, training_title
from tra.runs import settings_of

MAX_POINTS = 250
"""Points of a training curve."""

DIAGNOSES = FAILURES | {
    "kept": "share of keys kept",
    "counted": "share of keys that count as distance",
    "null": "share of queries that keep no key",
    "reach": "reach, tokens",
}
TRAINING = {"loss": "", "exact": "sequences without an error", "accuracy": "right symbols"}
LOGARITHMIC = ("perplexity", "reach", "loss")

Lines = list[dict[str, Any]]


def charts(section: Section) -> list[dict[str, Any]]:
    """Return all charts of a section, those by length first."""
    found: list[dict[str, Any]] = []
    trained = section.runs[0].trained_length
    if splits := curves.splits_of(section.runs):
        lines = _lines_by_length(section, splits, curves.exact_match)
        measure = _measure("exact", "sequences without an error", lines)
        found.append(_chart("length", "Exact match by length", "length of the input", trained, [measure]))
    for text, overlap in curves.texts_of(section.runs):
        by_group = [curves.perplexity_curve(group.runs, text, overlap) for group in section.groups]
        measure = _measure("perplexity", "perplexity", _lines(by_group, "window"))
        title = f"Perplexity by window: {overlap_text(text, overlap)}"
        found.append(_chart("perplexity", title, "window, tokens", trained, [measure]))
    for text, splits in _diagnosed_splits(section).items():
        measures = []
        for name, title in DIAGNOSES.items():
            if name == "counted" and not any(settings_of(group.variant)[1] for group in section.groups):
                continue  # equal to the share of keys kept
            if lines := _lines_by_length(section, splits, partial(curves.diagnosis, name)):
                measures.append(_measure(name, title, lines))
        if measures:
            title = f"The failures of attention by length{f': {text}' if text else ''}"
            found.append(_chart("failures", title, "length of the input", trained, measures))
    measures = []
    for name, title in TRAINING.items():
        by_group = [_thinned(curves.training_curve(group.runs, name)) for group in section.groups]
        lines = _lines(by_group, "step", "geometric mean" if name == "loss" else "mean")
        if any(value for line in lines for value in line["y"]):
            measures.append(_measure(name, title or training_title(any(line["several"] for line in lines)), lines))
    if measures:
        found.append(_chart("training", "Training", "step", None, measures))
    return found


def _measure(name: str, title: str, lines: Lines) -> dict[str, Any]:
    """Return what the script knows of a measure; `unit` is one that lies between 0 and 1."""
    log = name in LOGARITHMIC
    return {"name": name, "title": title, "unit": not log, "log": log, "lines": lines}


def _chart(kind: str, title: str, x_title: str, trained: int | None, measures: Lines) -> dict[str, Any]:
    x = [x for measure in measures for line in measure["lines"] for x in line["x"]]
    log = kind != "training" and bool(x) and min(x) > 0 and max(x) >= 8 * min(x)
    return {"kind": kind, "title": title, "x_title": x_title, "x_log": log, "trained": trained, "measures": measures}


def _lines_by_length(section: Section, splits: Sequence[Split], level_of: Callable[[Runs, str], Level | None]) -> Lines:
    """Return a line through the first test set of every length; others of that length are points beside it."""
    through = curves.first_of_length(splits)
    lines: Lines = []
    for number, group in enumerate(section.groups):
        for chosen in (through, [split for split in splits if split not in through]):
            levels = [(split, level_of(group.runs, split.name)) for split in chosen]
            words = [f"{split.name}, length {split.label}" for split, level in levels if level]
            curve = curves.curve_of((split.length, level) for split, level in levels)
            lines += _line(number, curve, words, alone=chosen is not through)
    return lines


def _lines(by_group: Iterable[Curve], what: str, kind: str = "mean") -> Lines:
    """Return a line per group; `what` is counted along it."""
    lines: Lines = []
    for number, curve in enumerate(by_group):
        lines += _line(number, curve, [f"{what} {x:,}" for x in curve.x], kind=kind)
    return lines


def _line(number: int, curve: Curve, where: Iterable[str], alone: bool = False, kind: str = "mean") -> Lines:
    if not curve.x:
        return []
    seeds = [f"\n{kind} and range of {level.runs} seeds" if level.runs > 1 else "" for level in curve.levels]
    return [
        {
            "group": number,
            "alone": alone,
            "several": max(level.runs for level in curve.levels) > 1,
            "x": curve.x,
            "y": _rounded(curve.middle),
            "low": _rounded(curve.low),
            "high": _rounded(curve.high),
            "text": [f"{w}\n{level.text}{more}" for w, level, more in zip(where, curve.levels, seeds, strict=True)],
        }
    ]


def _thinned(curve: Curve) -> Curve:
    every = max(1, math.ceil(len(curve.x) / MAX_POINTS))
    kept = sorted({*range(0, len(curve.x), every), len(curve.x) - 1}) if curve.x else []
    return Curve([curve.x[index] for index in kept], [curve.levels[index] for index in kept])


def _diagnosed_splits(section: Section) -> dict[str, list[Split]]:
    """Return the test sets with a diagnosis; those of language models by text, as their splits read text/window."""
    found: dict[str, list[Split]] = {}
    for split in curves.splits_of(section.runs, diagnosed=True):
        found.setdefault(split.name.rsplit("/", 1)[0] if section.task == "text" else "", []).append(split)
    return found


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
