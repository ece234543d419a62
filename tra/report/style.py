"""Give all figures one style: colour-blind safe, and each mechanism the same colour, marker and line everywhere."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

from tra.report.curves import Curve
from tra.report.names import COLOURS, NAMES, name_of
from tra.runs import write_atomically

SETTINGS: Any = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.bbox": "tight",
}

MAX_LINES = 6
"""Mechanisms in one panel, beyond which there are several panels."""

# In grey print, markers and lines tell mechanisms apart: neighbours in tables differ in both.
_MARKERS = "osD^vP*X<>phd8Hs"
_LINES: tuple[Any, ...] = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_HATCHES = ("", "///", "...", "xx", "\\\\\\", "++")


def styled() -> Any:
    """Return a context in which to draw a figure."""
    return plt.rc_context(SETTINGS)


@contextmanager
def panels(
    path: Path, rows: int, columns: int, size: tuple[float, float], tight: bool = False, **options: Any
) -> Iterator[Any]:
    """Give the panels `[rows, columns]` of a figure to draw on, and write it afterwards."""
    with styled():
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
        yield axes
        if tight:
            figure.tight_layout()
        save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write and close a figure. A PNG gets a palette of 256 colours, which is a third of the bytes."""
    kind = path.suffix.lower()[1:]
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    if kind == "png":
        whole = Image.open(drawn).convert("RGB")
        drawn = io.BytesIO()
        whole.quantize(256, dither=Image.Dither.NONE).save(
            drawn, format="png", optimize=True, dpi=whole.info.get("dpi")
        )
    write_atomically(path, drawn.getvalue())
    plt.close(figure)


def draw_curve(axes: Any, curve: Curve, opacity: float = 0.13, **line: Any) -> None:
    """Draw a line and its range."""
    (drawn,) = axes.plot(curve.x, curve.middle, **line)
    axes.fill_between(curve.x, curve.low, curve.high, color=drawn.get_color(), alpha=opacity, linewidth=0)


def mark_trained_length(axes: Any, trained_at: int) -> None:
    axes.axvline(trained_at, color="black", linewidth=0.8, linestyle=":")


def legend_above(axes: Any, columns: int = 1, **handles: Any) -> None:
    """Put the legend over a panel, where no line runs into it."""
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.3, ncols=columns, **handles)


def colour_of(mechanism: str) -> str:
    return COLOURS.get(mechanism, "#000000")


def line_style(mechanism: str) -> dict[str, Any]:
    """Return how a mechanism's line is drawn, and its label."""
    number = _number(mechanism)
    return {
        "color": colour_of(mechanism),
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": "-" if mechanism == "tra" else _LINES[number % len(_LINES)],
        "markersize": 4,
        "linewidth": 1.4,
        "label": name_of(mechanism),
    }


def bar_hatch(mechanism: str) -> str:
    """Return the pattern of a bar, which differs between TRA and the paper's rivals."""
    order = ["tra", "rope", "forgetting", "cope"]
    return _HATCHES[order.index(mechanism) if mechanism in order else 4 + _number(mechanism) % 2]


def _number(mechanism: str) -> int:
    return list(NAMES).index(mechanism) if mechanism in NAMES else len(NAMES)


def split_into_panels(mechanisms: Sequence[str]) -> list[list[str]]:
    """Return the mechanisms of each panel: all in one, or where they are many four each, with TRA to compare with."""
    if len(mechanisms) <= MAX_LINES:
        return [list(mechanisms)]
    panels = [list(mechanisms[first : first + 4]) for first in range(0, len(mechanisms), 4)]
    return [panel if "tra" in panel or "tra" not in mechanisms else ["tra", *panel] for panel in panels]


def length_ticks(axes: Any, lengths: Sequence[int]) -> None:
    """Make an axis logarithmic, with a tick for each measured length, and numbers as far as they have room."""
    axes.set_xscale("log")
    labels, room = [], 0.06 * math.log(max(lengths) / min(lengths))
    last = -math.inf
    for length in sorted(lengths):
        shown = math.log(length) - last >= room
        last = math.log(length) if shown else last
        labels.append("" if not shown else f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}")
    axes.set_xticks(sorted(lengths), labels)
    axes.minorticks_off()
