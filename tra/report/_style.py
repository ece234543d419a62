"""One look for all figures: colour-blind safe, the same colour for the same mechanism everywhere."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's palette, in an order that keeps TRA and the paper's rivals apart.
COLOURS = {
    "tra": "#0072B2",
    "rope": "#D55E00",
    "forgetting": "#009E73",
    "cope": "#CC79A7",
    "nope": "#7F7F7F",
}

NAMES = {"tra": "TRA", "rope": "RoPE", "forgetting": "FoT", "cope": "CoPE", "nope": "NoPE"}
"""As people write them."""

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


def styled() -> Any:
    """A context in which figures are drawn."""
    return plt.rc_context(SETTINGS)


def colour(mechanism: str) -> str:
    return COLOURS.get(mechanism, "#000000")
