"""What each head does, from diagnose.jsonl: gate and reach by layer and head, and the share of keys kept by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt

from tra.report._style import NAMES, length_ticks, save, styled
from tra.report.lengths import Curve, first_of_length
from tra.report.runs import EvaluatedRun, in_order

MEASURES = {"log_forget": "gate, log σ", "reach": "reach, tokens"}


class Heads(NamedTuple):
    """A measure of a mechanism, the layers of its seeds below each other: no mean, as their heads have no order."""

    length: int  # of the sequences
    layers: list[str]
    values: npt.NDArray[np.float64]  # [seeds · layers, H]; NaN where nothing was seen


def head_grids(runs: Sequence[EvaluatedRun]) -> dict[str, dict[str, Heads]]:
    """By measure and mechanism, at the greatest length that was diagnosed; without those that don't have it."""
    found: dict[str, dict[str, Heads]] = {}
    for measure in MEASURES:
        for mechanism in in_order(runs):
            layers, values, length = [], [], 0
            group = [run for run in runs if run.mechanism == mechanism]
            for run in group:
                *_, (length, row) = first_of_length(run.diagnosis).items() or [(0, {})]
                for layer, heads in enumerate(row.get(measure) or []):
                    layers.append(f"{layer}" if len(group) == 1 else f"{run.seed}.{layer}")
                    values.append([np.nan if value is None else value for value in heads])
            if values:
                found.setdefault(measure, {})[mechanism] = Heads(length, layers, np.array(values))
    return found


def kept_curves(runs: Sequence[EvaluatedRun]) -> dict[str, list[Curve]]:
    """By mechanism, a curve per layer: the share of keys kept, mean over heads and seeds, with the range of seeds."""
    found: dict[str, list[Curve]] = {}
    for mechanism in in_order(runs):
        seeds = [first_of_length(run.diagnosis) for run in runs if run.mechanism == mechanism]
        lengths = sorted({length for rows in seeds for length, row in rows.items() if row.get("kept")})
        points: dict[int, list[tuple[float, float, float]]] = {}
        for length in lengths:
            kept = np.array([rows[length]["kept"] for rows in seeds if length in rows], dtype=float)  # [seeds, L, H]
            for layer, values in enumerate(np.nanmean(kept, axis=2).T):
                points.setdefault(layer, []).append((values.mean(), values.min(), values.max()))
        if points:
            columns = ([list(column) for column in zip(*of, strict=True)] for of in points.values())
            found[mechanism] = [Curve(lengths, *of) for of in columns]
    return found


def draw_heads(grids: dict[str, dict[str, Heads]], path: Path) -> None:
    """A row of panels per measure, a panel per mechanism, a number per head."""
    widest = max(len(of) for of in grids.values())
    (tall, wide) = np.max([heads.values.shape for of in grids.values() for heads in of.values()], axis=0)
    with styled(), mpl.rc_context({"axes.grid": False}):
        size = (0.9 + widest * max(1.7, 0.42 * wide + 0.6), len(grids) * (0.9 + 0.24 * tall))
        figure, panels = plt.subplots(len(grids), widest, figsize=size, squeeze=False)
        for axes_row, (measure, by_mechanism) in zip(panels, grids.items(), strict=True):
            every = np.concatenate([heads.values.ravel() for heads in by_mechanism.values()])
            low, high = np.nanmin(every), np.nanmax(every)
            for axes, (mechanism, heads) in zip(axes_row, by_mechanism.items(), strict=False):
                _draw_grid(axes, heads, low, high)
                axes.set_title(NAMES.get(mechanism, mechanism), fontsize=9)
                axes.set_xlabel("head", fontsize=8)
            for axes in axes_row[len(by_mechanism) :]:
                axes.set_visible(False)
            length = max(heads.length for heads in by_mechanism.values())
            several = any("." in name for heads in by_mechanism.values() for name in heads.layers)
            axes_row[0].set_ylabel(f"{MEASURES[measure]}\n{'seed.layer' if several else 'layer'}, length {length:,}")
        figure.tight_layout()
        save(figure, path)


def _draw_grid(axes: Any, heads: Heads, low: float, high: float) -> None:
    spread = high - low or 1.0
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


def draw_kept(curves: dict[str, list[Curve]], path: Path) -> None:
    """A panel per mechanism, a line per layer."""
    lengths = sorted({length for layers in curves.values() for layer in layers for length in layer.lengths})
    with styled():
        size = (2.6 * len(curves) + 0.9, 2.9)
        figure, panels = plt.subplots(1, len(curves), figsize=size, sharey=True, squeeze=False)
        for axes, (mechanism, layers) in zip(panels[0], curves.items(), strict=True):
            for number, (at, middle, low, high) in enumerate(layers):
                shade = mpl.colormaps["viridis"](0.85 * number / max(1, len(layers) - 1))
                marker, line = "osD^vPX*"[number % 8], ("-", "--", ":", "-.")[number % 4]
                axes.plot(at, middle, line, color=shade, marker=marker, markersize=4, label=f"layer {number}")
                axes.fill_between(at, low, high, color=shade, alpha=0.15, linewidth=0)
            axes.set_title(NAMES.get(mechanism, mechanism), fontsize=10)
            length_ticks(axes, lengths)
            axes.set_ylim(0, 1.03)
            axes.set_xlabel("length")
        panels[0][0].set_ylabel("share of keys kept")
        panels[0][-1].legend(fontsize=8)
        figure.tight_layout()
        save(figure, path)
