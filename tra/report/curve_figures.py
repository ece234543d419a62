"""Draw curves of variants side by side: measures against length, training, and perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tra.report import style
from tra.report.curves import (
    Curve,
    curve_by_length,
    diagnosis,
    exact_match,
    perplexity_curve,
    splits_of,
    training_curve,
)
from tra.report.names import training_title
from tra.report.runs import EvaluatedRun, by_variant

AXIS_NAMES = {
    "negative_mass": "mass on keys of\nnegative content",
    "reversed": "pairs not in the\norder of content",
    "lifted": "negative key above\na positive one",
}
"""Measures of diagnose.jsonl that have a figure."""

SHARED_AXES: Any = {"sharex": True, "sharey": "row", "layout": "constrained"}

PERPLEXITY_TICKS = (10, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000, 2000)

Curves = dict[str, Curve]
"""Curves by variant, in the order of tables."""


def exact_curves(runs: Sequence[EvaluatedRun]) -> Curves:
    """Return exact match against length."""
    splits = splits_of(runs)
    return _curves(runs, lambda group: curve_by_length(group, splits, exact_match))


def failure_curves(runs: Sequence[EvaluatedRun]) -> dict[str, Curves]:
    """Return the failures of attention against length by measure, without those that were measured nowhere."""
    splits = splits_of(runs, diagnosed=True)
    found = {
        measure: _curves(runs, partial(curve_by_length, splits=splits, level_of=partial(diagnosis, measure)))
        for measure in AXIS_NAMES
    }
    return {measure: curves for measure, curves in found.items() if curves}


def training_curves(runs: Sequence[EvaluatedRun]) -> Curves:
    """Return the training loss against steps."""
    return _curves(runs, training_curve)


def perplexity_curves(runs: Sequence[EvaluatedRun], text: str, overlap: str = "none") -> Curves:
    """Return perplexity of a text against window."""
    return _curves(runs, lambda group: perplexity_curve(group, text, overlap))


def _curves(runs: Sequence[EvaluatedRun], curve_of: Any) -> Curves:
    found = {variant: curve_of(group) for variant, group in by_variant(runs).items()}
    return {variant: curve for variant, curve in found.items() if curve.x}


def draw_by_length(measures: dict[str, Curves], trained_at: int, marks: dict[str, str], path: Path) -> None:
    """Draw a row of panels for each measure. A dotted line marks the trained length.

    Args:
        marks: Marks behind the names of variants that broke down in training.
    """
    variants = list(dict.fromkeys(variant for curves in measures.values() for variant in curves))
    groups, lines = style.split_into_panels(variants), style.line_styles(variants, marks)
    lengths = sorted({length for curves in measures.values() for curve in curves.values() for length in curve.x})
    width = (5.5 if len(groups) == 1 else 2.9 * len(groups)) + 0.4
    size = (width, (0.7 if len(groups) == 1 else 1.2) + 2.2 * len(measures))
    with style.panels(path, len(measures), len(groups), size, **SHARED_AXES) as panels:
        for axes_row, (name, curves) in zip(panels, measures.items(), strict=True):
            for axes, group in zip(axes_row, groups, strict=True):
                for variant in group:
                    if variant in curves:
                        style.draw_curve(axes, curves[variant], **lines[variant])
                style.mark_trained_length(axes, trained_at)
                style.length_ticks(axes, lengths)
            highest = max(max(curve.high) for curve in curves.values())
            axes_row[0].set_ylim(-0.03 * highest, 1.03 * highest)
            axes_row[0].set_ylabel(name)
        for axes, group in zip(panels[0], groups, strict=True):
            handles = [axes.plot([], [], **lines[variant])[0] for variant in group]
            style.legend_above(axes, columns=1 if len(groups) > 1 else 3, handles=handles)
        for axes in panels[-1]:
            axes.set_xlabel("length (dotted: trained on)")
        if marks:
            style.note_below(panels[-1][0], style.BROKE_DOWN)


def draw_training(curves: Curves, marks: dict[str, str], path: Path) -> None:
    """Draw the loss on a logarithmic axis. `marks` are as for `draw_by_length`."""
    groups, lines = style.split_into_panels(list(curves)), style.line_styles(curves, marks)
    several = any(level.runs > 1 for curve in curves.values() for level in curve.levels)
    size = (5.5, 3.2) if len(groups) == 1 else (2.9 * len(groups) + 0.4, 3.6)
    with style.panels(path, 1, len(groups), size, **SHARED_AXES) as panels:
        for axes, group in zip(panels[0], groups, strict=True):
            for number, variant in enumerate(group):
                curve = curves[variant]
                every = max(1, len(curve.x) // 6)
                line = lines[variant] | {"linewidth": 0.7 * lines[variant]["linewidth"], "markersize": 3.5}
                style.draw_curve(axes, curve, markevery=(number * every // len(group), every), **line)
            axes.set_yscale("log")
            axes.set_xlabel("step")
            style.legend_above(axes, columns=1 if len(groups) > 1 else 3)
        panels[0][0].set_ylabel(training_title(several))
        if marks:
            style.note_below(panels[0][0], style.BROKE_DOWN)


def draw_perplexity(texts: dict[str, Curves], trained_at: int, path: Path) -> None:
    """Draw a panel per text; both axes are logarithmic."""
    lines = style.line_styles(variant for curves in texts.values() for variant in curves)
    with style.panels(path, 1, len(texts), (4.6 * len(texts), 3.6), sharey=True) as panels:
        for axes, (text, curves) in zip(panels[0], texts.items(), strict=True):
            for variant, curve in curves.items():
                style.draw_curve(axes, curve, opacity=0.12, **lines[variant])
            style.mark_trained_length(axes, trained_at)
            axes.set(xscale="log", yscale="log", title=text, xlabel="window, tokens")
            windows = sorted({window for curve in curves.values() for window in curve.x})
            axes.set_xticks(windows, [f"{w // 1024}k" if w >= 1024 else str(w) for w in windows])
            axes.minorticks_off()
        low = min(min(curve.low) for curves in texts.values() for curve in curves.values())
        high = max(max(curve.high) for curves in texts.values() for curve in curves.values())
        ticks = [tick for tick in PERPLEXITY_TICKS if low < tick < high]
        panels[0][0].set_yticks(ticks, [str(tick) for tick in ticks])
        panels[0][0].set_ylabel("perplexity")
        panels[0][0].legend()


def draw_positions(losses: dict[str, list[tuple[int, float | None, int]]], path: Path, title: str) -> None:
    """Draw the loss against the position in the window, from `by_position` of perplexity.jsonl."""
    lines = style.line_styles(losses)
    with style.panels(path, 1, 1, (5.5, 3.4)) as ((axes,),):
        for variant, positions in losses.items():
            ends, means = zip(*((end, mean) for end, mean, _ in positions if mean is not None), strict=True)
            axes.plot(ends, means, **lines[variant])
        axes.set(xscale="log", xlabel="place in the window, up to", ylabel="nats a token", title=title)
        axes.legend()
