"""Which figures runs of a task have, made from what was measured of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tra.report.heads import draw_heads, draw_kept, head_grids, kept_curves
from tra.report.lengths import draw_exact_by_length, draw_failures, exact_curves, failure_curves
from tra.report.runs import EvaluatedRun
from tra.report.training import draw_training, training_curves


class Figure(NamedTuple):
    file: str
    title: str
    draw: Callable[[Path], None]


def figures(runs: Sequence[EvaluatedRun]) -> list[Figure]:
    """Those for which there is data: lengths to compare, and a diagnosis."""
    trained_at = min(row["longest"] for run in runs for row in run.evaluation)
    exact, found = exact_curves(runs), []
    if any(len(curve.lengths) > 1 for curve in exact.values()):
        draw = partial(draw_exact_by_length, exact, trained_at)
        found.append(Figure("exact-by-length.png", "exact match against length", draw))
    if failures := failure_curves(runs):
        draw = partial(draw_failures, failures, trained_at)
        found.append(Figure("failures.png", "the two failures against length", draw))
    if grids := head_grids(runs):
        found.append(Figure("heads.png", "gate and reach by head", partial(draw_heads, grids)))
    if kept := kept_curves(runs):
        found.append(Figure("kept.png", "share of keys kept by layer", partial(draw_kept, kept)))
    found.append(Figure("training.png", "training loss", partial(draw_training, training_curves(runs))))
    return found


def write_figures(runs: Sequence[EvaluatedRun], out: Path) -> list[Path]:
    paths = []
    for figure in figures(runs):
        paths.append(out / figure.file)
        figure.draw(paths[-1])
    return paths


def links(runs: Sequence[EvaluatedRun], *files: str) -> list[str]:
    """Markdown that shows those of the files that there are, all by default."""
    chosen = [figure for figure in figures(runs) if not files or figure.file in files]
    return [line for figure in chosen for line in ("", f"![{figure.title}]({figure.file})")]
