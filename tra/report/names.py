"""Name mechanisms and measures, and give mechanisms colours, for figures and the page alike."""

from __future__ import annotations

# In the order of tables. Okabe and Ito's palette for TRA and the paper's rivals; shades near it for the others.
_MECHANISMS = {
    "tra": ("TRA", "#0072B2"),
    "tra-threshold-only": ("TRA, threshold only", "#56B4E9"),
    "tra-distance-only": ("TRA, distance only", "#004C77"),
    "tra-plain-distance": ("TRA, plain distance", "#88CCEE"),
    "rope": ("RoPE", "#D55E00"),
    "cope": ("CoPE", "#CC79A7"),
    "forgetting": ("FoT", "#009E73"),
    "stickbreaking": ("stick-breaking", "#005F45"),
    "selective": ("selective", "#8C510A"),
    "alibi": ("ALiBi", "#E69F00"),
    "ssmax": ("SSMax", "#F0A07A"),
    "entmax": ("1.5-entmax", "#44AA99"),
    "differential": ("differential", "#882255"),
    "sinusoidal": ("sinusoidal", "#B3A369"),
    "nope": ("NoPE", "#7F7F7F"),
    "lstm": ("LSTM", "#000000"),
}

NAMES = {mechanism: name for mechanism, (name, _) in _MECHANISMS.items()}
"""How people write them, in the order of tables."""

COLOURS = {mechanism: colour for mechanism, (_, colour) in _MECHANISMS.items()}

FAILURES = {
    "negative_mass": "mass on keys of negative content score",
    "reversed": "pairs of keys not in the order of content; dropped pairs count as in order",
    "reversed_kept": "the same, of pairs that are both kept",
    "lifted": "pairs in which a key of negative content stands above one of positive content",
}
"""What goes wrong in attention, by the names that diagnose.jsonl has."""


def name_of(mechanism: str) -> str:
    """Return what people call a mechanism, or its own name if it is not one of ours."""
    return NAMES.get(mechanism, mechanism)


def overlap_text(text: str, overlap: str) -> str:
    """Return how a text was read: `wiki, windows side by side`."""
    return f"{text}, {'windows side by side' if overlap == 'none' else f'windows that overlap by {overlap}'}"


def training_title(several: bool) -> str:
    """Return what a curve of the training loss shows, of several seeds or of one."""
    return "training loss, geometric mean" if several else "training loss"
