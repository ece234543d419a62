"""One look for all figures: colour-blind safe, the same colour for the same mechanism everywhere."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's palette for TRA and the paper's rivals; lighter and darker kin for the others.
COLOURS = {
    "tra": "#0072B2",
    "rope": "#D55E00",
    "forgetting": "#009E73",
    "cope": "#CC79A7",
    "nope": "#7F7F7F",
    "sinusoidal": "#B3A369",
    "alibi": "#E69F00",
    "stickbreaking": "#005F45",
    "selective": "#8C510A",
    "differential": "#882255",
    "ssmax": "#F0A07A",
    "entmax": "#44AA99",
    "tra-threshold-only": "#56B4E9",
    "tra-distance-only": "#004C77",
    "tra-plain-distance": "#88CCEE",
    "lstm": "#000000",
}

NAMES = {
    "tra": "TRA",
    "tra-threshold-only": "TRA, threshold only",
    "tra-distance-only": "TRA, distance only",
    "tra-plain-distance": "TRA, plain distance",
    "rope": "RoPE",
    "cope": "CoPE",
    "forgetting": "FoT",
    "stickbreaking": "stick-breaking",
    "selective": "selective",
    "alibi": "ALiBi",
    "ssmax": "SSMax",
    "entmax": "1.5-entmax",
    "differential": "differential",
    "sinusoidal": "sinusoidal",
    "nope": "NoPE",
    "lstm": "LSTM",
}
"""As people write them, in the order in which tables show them."""

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
