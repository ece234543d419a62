"""Training curves: loss against steps, mechanisms side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from tra.report._style import NAMES, colour, styled


def draw_training(metrics: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw rows of metrics.jsonl.

    Args:
        metrics: Per mechanism its rows.
        path: Where the figure goes; the suffix says the format.
    """
    with styled():
        figure, axes = plt.subplots(figsize=(5.5, 3.2))
        for mechanism, rows in metrics.items():
            steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
            axes.plot(steps, losses, color=colour(mechanism), label=NAMES.get(mechanism, mechanism), linewidth=1)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.legend()
        figure.savefig(path)
        plt.close(figure)
