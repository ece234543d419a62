"""Draw what each head does, from diagnose.jsonl: gate and reach by head, and the share of keys kept by layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

from tra.report.curves import Curve, curve_by_length, diagnosis, first_of_length, newest, splits_of
from tra.report.names import name_of
from tra.report.runs import EvaluatedRun, by_variant
from tra.report.style import draw_curve, length_ticks, panels
from tra.runs import settings_of

MEASURES = {"log_forget": "gate, log σ", "reach": "reach, tokens"}
KEPT_MEASURES = {"kept": "share of keys kept", "counted": "share of keys counted"}


class Heads(NamedTuple):
    """A measure of a variant. Seeds are shown below each other, without a mean, because heads have no order."""

    length: int  # of the sequences
    layers: list[str]
    values: npt.NDArray[np.float64]  # [seeds · layers, H]; NaN where nothing was seen


def head_grids(runs: Sequence[EvaluatedRun]) -> dict[str, dict[str, Heads]]:
    """Return the measures of each variant that has them, at the greatest length that was diagnosed."""
    found: dict[str, dict[str, Heads]] = {}
    for measure in MEASURES:
        for variant, group in by_variant(runs).items():
            layers, values, length = [], [], 0
            for run in group:
                if not run.diagnosis:
                    continue
                name, length, _ = first_of_length(splits_of([run], diagnosed=True))[-1]
                (row,) = newest(run.diagnosis, name)
                for layer, heads in enumerate(row.get(measure) or []):
                    layers.append(f"{layer}" if len(group) == 1 else f"{run.seed}.{layer}")
                    values.append([np.nan if value is None else value for value in heads])
            if values:
                found.setdefault(measure, {})[variant] = Heads(length, layers, np.array(values))
    return found


def kept_curves(runs: Sequence[EvaluatedRun]) -> dict[str, dict[str, list[Curve]]]:
    """Return the share of keys kept by length and, if a run has a margin, of keys that count as distance.

    There is a curve for each measure, variant and layer: means over heads and seeds.
    """
    measures = ["kept", *(["counted"] if any(settings_of(run.variant)[1] for run in runs) else [])]
    found = {measure: _curves_by_layer(runs, measure) for measure in measures}
    return {measure: curves for measure, curves in found.items() if curves}


def _curves_by_layer(runs: Sequence[EvaluatedRun], measure: str) -> dict[str, list[Curve]]:
    found: dict[str, list[Curve]] = {}
    splits = splits_of(runs, diagnosed=True)
    for variant, group in by_variant(runs).items():
        n_layers = max(len(row.get(measure) or []) for run in group for row in run.diagnosis or [{}])
        levels = (partial(diagnosis, measure, layer=layer) for layer in range(n_layers))
        curves = [curve_by_length(group, splits, level_of) for level_of in levels]
        if curves:
            found[variant] = curves
    return found


def draw_heads(grids: dict[str, dict[str, Heads]], path: Path) -> None:
    """Draw a row of panels for each measure, with a panel for each variant and a number for each head."""
    columns = max(len(grid) for grid in grids.values())
    tall, wide = np.max([heads.values.shape for grid in grids.values() for heads in grid.values()], axis=0)
    size = (0.9 + columns * max(1.7, 0.42 * wide + 0.6), len(grids) * (0.9 + 0.24 * tall))
    with panels(path, len(grids), columns, size, tight=True) as rows:
        for axes_row, (measure, grid) in zip(rows, grids.items(), strict=True):
            values = np.concatenate([heads.values.ravel() for heads in grid.values()])
            low, high = np.nanmin(values), np.nanmax(values)
            for axes, (variant, heads) in zip(axes_row, grid.items(), strict=False):
                _draw_grid(axes, heads, low, high)
                axes.set_title(name_of(variant), fontsize=9)
                axes.set_xlabel("head", fontsize=8)
            for axes in axes_row[len(grid) :]:
                axes.set_visible(False)
            length = max(heads.length for heads in grid.values())
            several = any("." in name for heads in grid.values() for name in heads.layers)
            axes_row[0].set_ylabel(f"{MEASURES[measure]}\n{'seed.layer' if several else 'layer'}, length {length:,}")


def _draw_grid(axes: Any, heads: Heads, low: float, high: float) -> None:
    spread = high - low or 1.0
    axes.grid(visible=False)
    axes.imshow(heads.values, cmap="Blues", vmin=low - 0.1 * spread, vmax=high, aspect="auto")
    for (row, column), value in np.ndenumerate(heads.values):
        text = "-" if np.isnan(value) else f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"
        dark = value > low + 0.55 * spread
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    layers = 1 + max(int(name.split(".")[-1]) for name in heads.layers)
    for edge in range(layers, len(heads.layers), layers):
        axes.axhline(edge - 0.5, color="white", linewidth=3)
    axes.set_yticks(range(len(heads.layers)), heads.layers, fontsize=7)
    axes.set_xticks(range(heads.values.shape[1]), [str(head) for head in range(heads.values.shape[1])], fontsize=7)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def draw_kept(measures: dict[str, dict[str, list[Curve]]], path: Path) -> None:
    """Draw a row of panels for each measure, with a panel for each variant and a line for each layer."""
    variants = list(dict.fromkeys(variant for found in measures.values() for variant in found))
    every = [curve for found in measures.values() for curves in found.values() for curve in curves]
    lengths = sorted({length for curve in every for length in curve.x})
    size = (2.6 * len(variants) + 0.9, 2.9 * len(measures))
    with panels(path, len(measures), len(variants), size, sharey=True, tight=True) as rows:
        for row, (measure, found) in zip(rows, measures.items(), strict=True):
            for axes, variant in zip(row, variants, strict=True):
                for layer, curve in enumerate(found.get(variant, [])):
                    shade = mpl.colormaps["viridis"](0.85 * layer / max(1, len(found[variant]) - 1))
                    line = {"marker": "osD^vPX*"[layer % 8], "linestyle": ("-", "--", ":", "-.")[layer % 4]}
                    draw_curve(axes, curve, 0.15, color=shade, markersize=4, label=f"layer {layer}", **line)
                axes.set_visible(variant in found)
                axes.set_title(name_of(variant), fontsize=10)
                length_ticks(axes, lengths)
                axes.set_ylim(0, 1.03)
                axes.set_xlabel("length")
            row[0].set_ylabel(KEPT_MEASURES[measure])
        rows[0][-1].legend(fontsize=8)
