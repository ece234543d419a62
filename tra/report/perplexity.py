"""Perplexity against window, mechanisms side by side: what is drawn, and the drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from tra.report._style import look, save, styled
from tra.report.runs import EvaluatedRun, in_order

DRAWS = 2000


class Curve(NamedTuple):
    """A mechanism on a text. The band is the range of seeds, or with one seed the interval over documents."""

    windows: list[int]
    perplexity: list[float]
    low: list[float]
    high: list[float]


def perplexity_curves(runs: Sequence[EvaluatedRun], text: str, overlap: str = "none") -> dict[str, Curve]:
    """By mechanism, in the order in which tables show them; geometric means over seeds."""
    found: dict[str, Curve] = {}
    for mechanism in in_order(runs):
        group = [run for run in runs if run.mechanism == mechanism]
        rows = [row for run in group for row in run.perplexity if (row["text"], row["overlap"]) == (text, overlap)]
        windows, middles, lows, highs = sorted({row["window"] for row in rows}), [], [], []
        for window in windows:
            here = [row for row in rows if row["window"] == window]
            losses = [row["loss"] for row in here]
            if len(here) == 1:
                low, high = here[0]["low"] or here[0]["perplexity"], here[0]["high"] or here[0]["perplexity"]
            else:
                low, high = float(np.exp(min(losses))), float(np.exp(max(losses)))
            middles.append(float(np.exp(np.mean(losses))))
            lows.append(low)
            highs.append(high)
        if windows:
            found[mechanism] = Curve(windows, middles, lows, highs)
    return found


def times_as_perplexed(run: EvaluatedRun, other: EvaluatedRun, text: str, window: int) -> tuple[float, float, float]:
    """Perplexity of `run` over that of `other`, with a 95 % interval: the same documents drawn anew for both."""
    (a,), (b,) = (
        [np.array(row["by_document"]) for row in each.perplexity if _is(row, text, window)] for each in (run, other)
    )
    counts = a[:, 1]
    differences = a[:, 0] - b[:, 0]
    drawing = np.random.default_rng(0)
    means = []
    for _ in range(DRAWS):
        drawn = drawing.integers(len(counts), size=len(counts))
        means.append(differences[drawn].sum() / counts[drawn].sum())
    middle = differences.sum() / counts.sum()
    low, high = np.quantile(means, [0.025, 0.975])
    return float(np.exp(middle)), float(np.exp(low)), float(np.exp(high))


def _is(row: dict[str, object], text: str, window: int) -> bool:
    return (row["text"], row["window"], row["overlap"]) == (text, window, "none")


def draw_perplexity(curves: dict[str, dict[str, Curve]], trained_at: int, path: Path) -> None:
    """A panel per text; both axes logarithmic."""
    with styled():
        figure, panels = plt.subplots(1, len(curves), figsize=(4.6 * len(curves), 3.6), sharey=True, squeeze=False)
        for axes, (text, by_mechanism) in zip(panels[0], curves.items(), strict=True):
            for mechanism, curve in by_mechanism.items():
                style = look(mechanism)
                axes.plot(curve.windows, curve.perplexity, **style)
                axes.fill_between(curve.windows, curve.low, curve.high, color=style["color"], alpha=0.12, linewidth=0)
            axes.axvline(trained_at, color="black", linewidth=0.8, linestyle=":")
            axes.set(xscale="log", yscale="log", title=text, xlabel="window, tokens")
            windows = sorted({window for curve in by_mechanism.values() for window in curve.windows})
            axes.set_xticks(windows, [f"{w // 1024}k" if w >= 1024 else str(w) for w in windows])
            axes.minorticks_off()
        low = min(min(curve.low) for each in curves.values() for curve in each.values())
        high = max(max(curve.high) for each in curves.values() for curve in each.values())
        ticks = [
            tick for tick in (10, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000, 2000) if low < tick < high
        ]
        panels[0][0].set_yticks(ticks, [str(tick) for tick in ticks])
        panels[0][0].set_ylabel("perplexity")
        panels[0][0].legend()
        save(figure, path)


def draw_positions(rows: dict[str, list[tuple[int, float | None, int]]], path: Path, title: str) -> None:
    """Nats a token against its place in the window."""
    with styled():
        figure, axes = plt.subplots(figsize=(5.5, 3.4))
        for mechanism, places in rows.items():
            seen = [(end, mean) for end, mean, _ in places if mean is not None]
            ends, means = zip(*seen, strict=True)
            axes.plot(ends, means, **look(mechanism))
        axes.set(xscale="log", xlabel="place in the window, up to", ylabel="nats a token", title=title)
        axes.legend()
        save(figure, path)
