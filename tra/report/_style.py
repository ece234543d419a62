"""One look for all figures: colour-blind safe, the same colour, marker and line for the same mechanism everywhere."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

from tra.report._names import COLOURS, NAMES

__all__ = ["COLOURS", "NAMES", "SETTINGS", "colour", "grouped", "hatch", "length_ticks", "look", "save", "styled"]

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

TOGETHER = 6
"""Mechanisms that one panel can bear."""

# Print in grey leaves markers and lines to tell mechanisms apart: neighbours in tables differ in both.
_MARKERS = "osD^vP*X<>phd8Hs"
_LINES: tuple[Any, ...] = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_HATCHES = ("", "///", "...", "xx", "\\\\\\", "++")


def styled() -> Any:
    """A context in which figures are drawn."""
    return plt.rc_context(SETTINGS)


def save(figure: Any, path: Path) -> None:
    """Write and close a figure. A PNG gets a palette of 256 colours, which is a third of the bytes."""
    if path.suffix.lower() == ".png":
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        whole = Image.open(drawn).convert("RGB")
        whole.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True, dpi=whole.info.get("dpi"))
    else:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    plt.close(figure)


def legend_above(axes: Any, handles: Sequence[Any] | None = None, columns: int = 1) -> None:
    """Over a panel, where no line runs into it."""
    more = {} if handles is None else {"handles": handles}
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.3, ncols=columns, **more)


def colour(mechanism: str) -> str:
    return COLOURS.get(mechanism, "#000000")


def look(mechanism: str) -> dict[str, Any]:
    """How a mechanism's line is drawn, and what it is called."""
    number = _number(mechanism)
    return {
        "color": colour(mechanism),
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": "-" if mechanism == "tra" else _LINES[number % len(_LINES)],
        "markersize": 4,
        "linewidth": 1.4,
        "label": NAMES.get(mechanism, mechanism),
    }


def hatch(mechanism: str) -> str:
    """Of bars: one pattern among TRA and the paper's rivals each."""
    order = ["tra", "rope", "forgetting", "cope"]
    return _HATCHES[order.index(mechanism) if mechanism in order else 4 + _number(mechanism) % 2]


def _number(mechanism: str) -> int:
    return list(NAMES).index(mechanism) if mechanism in NAMES else len(NAMES)


def grouped(mechanisms: Sequence[str]) -> list[list[str]]:
    """One panel, or where they are many as few as hold four each; TRA stands in every one, to compare with."""
    if len(mechanisms) <= TOGETHER:
        return [list(mechanisms)]
    groups = [list(mechanisms[first : first + 4]) for first in range(0, len(mechanisms), 4)]
    return [group if "tra" in group or "tra" not in mechanisms else ["tra", *group] for group in groups]


def length_ticks(axes: Any, lengths: Sequence[int]) -> None:
    """A logarithmic axis with a tick for each length that was measured, and numbers as far as they have room."""
    axes.set_xscale("log")
    numbers, room = [], 0.06 * math.log(max(lengths) / min(lengths))
    last = -math.inf
    for length in sorted(lengths):
        shown = math.log(length) - last >= room
        last = math.log(length) if shown else last
        numbers.append("" if not shown else f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}")
    axes.set_xticks(sorted(lengths), numbers)
    axes.minorticks_off()
