"""Choose the figures that runs of a task have, by what was measured of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tra.report.breakdowns import marks
from tra.report.curve_figures import (
    AXIS_NAMES,
    draw_by_length,
    draw_training,
    exact_curves,
    failure_curves,
    training_curves,
)
from tra.report.heads import draw_heads, draw_kept, head_grids, kept_curves
from tra.report.runs import EvaluatedRun


class Figure(NamedTuple):
    """A figure that there is data for."""

    file: str
    title: str
    draw: Callable[[Path], None]


def figures(runs: Sequence[EvaluatedRun]) -> list[Figure]:
    """Return the figures of these runs: by length where there are several lengths, of heads after a diagnosis."""
    shortest = min(row["longest"] for run in runs for row in run.evaluation)
    exact, marked = exact_curves(runs), marks(runs)
    found = []
    if any(len(curve.x) > 1 for curve in exact.values()):
        draw = partial(draw_by_length, {"sequences without an error": exact}, shortest, marked)
        found.append(Figure("exact-by-length.png", "exact match against length", draw))
    if failures := failure_curves(runs):
        draw = partial(draw_by_length, {AXIS_NAMES[measure]: of for measure, of in failures.items()}, shortest, marked)
        found.append(Figure("failures.png", "the two failures against length", draw))
    if grids := head_grids(runs):
        found.append(Figure("heads.png", "gate and reach by head", partial(draw_heads, grids)))
    if kept := kept_curves(runs):
        found.append(Figure("kept.png", "share of keys kept by layer", partial(draw_kept, kept)))
    found.append(Figure("training.png", "training loss", partial(draw_training, training_curves(runs), marked)))
    return found


def write_figures(runs: Sequence[EvaluatedRun], out: Path) -> list[Path]:
    """Draw all figures of these runs into a folder."""
    drawn = figures(runs)
    for figure in drawn:
        figure.draw(out / figure.file)
    return [out / figure.file for figure in drawn]


def links(runs: Sequence[EvaluatedRun], *files: str) -> list[str]:
    """Return Markdown that shows those of the files that these runs have; all by default."""
    chosen = [figure for figure in figures(runs) if not files or figure.file in files]
    return [line for figure in chosen for line in ("", f"![{figure.title}]({figure.file})")]
