"""Training curves: loss against steps, mechanisms side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from tra.report._style import grouped, legend_above, look, save, styled
from tra.report.lengths import Curve
from tra.report.runs import EvaluatedRun, in_order


def training_curves(runs: Sequence[EvaluatedRun]) -> dict[str, Curve]:
    """Loss by mechanism at the steps that all its seeds logged: geometric means, and the range of seeds."""
    found: dict[str, Curve] = {}
    for mechanism in in_order(runs):
        seeds = [{row["step"]: row["loss"] for row in run.metrics} for run in runs if run.mechanism == mechanism]
        steps = sorted(set.intersection(*(set(losses) for losses in seeds)))
        losses = np.array([[of[step] for step in steps] for of in seeds])
        middle = np.exp(np.log(losses).mean(0))
        found[mechanism] = Curve(steps, middle.tolist(), losses.min(0).tolist(), losses.max(0).tolist())
    return found


def draw_training(curves: dict[str, Curve], path: Path) -> None:
    """A panel, or several where mechanisms are many; the loss is logarithmic."""
    groups = grouped(list(curves))
    with styled():
        width = 5.5 if len(groups) == 1 else 2.9 * len(groups) + 0.4
        size = (width, 3.2 if len(groups) == 1 else 3.6)
        figure, panels = plt.subplots(
            1, len(groups), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
        )
        for axes, group in zip(panels[0], groups, strict=True):
            for number, mechanism in enumerate(group):
                steps, middle, low, high = curves[mechanism]
                style = look(mechanism) | {"linewidth": 1.0, "markersize": 3.5}
                every = max(1, len(steps) // 6)
                axes.plot(steps, middle, markevery=(number * every // len(group), every), **style)
                axes.fill_between(steps, low, high, color=style["color"], alpha=0.13, linewidth=0)
            axes.set_yscale("log")
            axes.set_xlabel("step")
            legend_above(axes, columns=1 if len(groups) > 1 else 3)
        panels[0][0].set_ylabel("training loss")
        save(figure, path)
