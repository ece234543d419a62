"""Measures against length, mechanisms side by side: exact match, and the two failures of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from tra.report._style import grouped, legend_above, length_ticks, look, save, styled
from tra.report.runs import EvaluatedRun, in_order
from tra.runs import mean_over_heads

MEASURES = {
    "negative_mass": "mass on keys of\nnegative content",
    "reversed": "pairs not in the\norder of content",
    "lifted": "negative key above\na positive one",
}
"""Of diagnose.jsonl, as axes name them."""


class Curve(NamedTuple):
    """A mechanism against length. The band is the range of seeds, or with one seed the interval, if there is one."""

    lengths: list[int]
    middle: list[float]
    low: list[float]
    high: list[float]


def exact_curves(runs: Sequence[EvaluatedRun]) -> dict[str, Curve]:
    """Exact match by mechanism, means over seeds. Of test sets of one length the first counts: others are harder."""
    return _curves(runs, lambda run: run.evaluation, lambda row: row["exact"], lambda row: (row["low"], row["high"]))


def failure_curves(runs: Sequence[EvaluatedRun]) -> dict[str, dict[str, Curve]]:
    """By measure and mechanism: means over layers, heads and seeds. What nothing was measured of is left out."""
    found = {
        measure: _curves(runs, lambda run: run.diagnosis, lambda row, m=measure: mean_over_heads(row.get(m)))  # type: ignore[misc]
        for measure in MEASURES
    }
    return {measure: curves for measure, curves in found.items() if curves}


def first_of_length(rows: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """By length, in rising order, the first row that has it."""
    found: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        found.setdefault(row["longest"], row)
    return dict(sorted(found.items()))


def _curves(
    runs: Sequence[EvaluatedRun],
    rows_of: Callable[[EvaluatedRun], Sequence[Mapping[str, Any]]],
    value_of: Callable[[Mapping[str, Any]], float | None],
    interval_of: Callable[[Mapping[str, Any]], tuple[float, float]] | None = None,
) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for mechanism in in_order(runs):
        seeds = [first_of_length(rows_of(run)) for run in runs if run.mechanism == mechanism]
        points = []
        for length in sorted({length for rows in seeds for length in rows}):
            here = [rows[length] for rows in seeds if length in rows]
            values = [value for row in here if (value := value_of(row)) is not None]
            if values:
                alone = len(values) == 1 and interval_of is not None
                low, high = interval_of(here[0]) if alone and interval_of else (min(values), max(values))
                points.append((length, sum(values) / len(values), low, high))
        if points:
            found[mechanism] = Curve(*(list(column) for column in zip(*points, strict=True)))
    return found


def draw_exact_by_length(curves: dict[str, Curve], trained_at: int, path: Path) -> None:
    """Sequences without an error against length; a line marks the length that was trained on."""
    _draw({"sequences without an error": curves}, trained_at, path)


def draw_failures(curves: dict[str, dict[str, Curve]], trained_at: int, path: Path) -> None:
    """A row of panels per measure."""
    _draw({MEASURES[measure]: of for measure, of in curves.items()}, trained_at, path)


def _draw(rows: dict[str, dict[str, Curve]], trained_at: int, path: Path) -> None:
    mechanisms = list(dict.fromkeys(name for curves in rows.values() for name in curves))
    groups = grouped(mechanisms)
    lengths = sorted({length for curves in rows.values() for curve in curves.values() for length in curve.lengths})
    width = (5.5 if len(groups) == 1 else 2.9 * len(groups)) + 0.4
    with styled():
        size = (width, (0.7 if len(groups) == 1 else 1.2) + 2.2 * len(rows))
        figure, panels = plt.subplots(
            len(rows), len(groups), figsize=size, sharex=True, sharey="row", squeeze=False, layout="constrained"
        )
        for axes_row, (name, curves) in zip(panels, rows.items(), strict=True):
            for axes, group in zip(axes_row, groups, strict=True):
                for mechanism in group:
                    if mechanism in curves:
                        draw_curve(axes, mechanism, curves[mechanism])
                axes.axvline(trained_at, color="black", linewidth=0.8, linestyle=":")
                length_ticks(axes, lengths)
            highest = max(max(curve.high) for curve in curves.values())
            axes_row[0].set_ylim(-0.03 * highest, 1.03 * highest)
            axes_row[0].set_ylabel(name)
        for axes, group in zip(panels[0], groups, strict=True):
            handles = [axes.plot([], [], **look(mechanism))[0] for mechanism in group]
            legend_above(axes, handles, columns=1 if len(groups) > 1 else 3)
        for axes in panels[-1]:
            axes.set_xlabel("length (dotted: trained on)")
        save(figure, path)


def draw_curve(axes: Any, mechanism: str, curve: Curve) -> None:
    """A line with its band."""
    style = look(mechanism)
    axes.plot(curve.lengths, curve.middle, **style)
    axes.fill_between(curve.lengths, curve.low, curve.high, color=style["color"], alpha=0.13, linewidth=0)
