"""What mechanisms and measures are called, and their colours: for figures and the page alike. Draws nothing."""

from __future__ import annotations

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

FAILURES = {
    "negative_mass": "mass on keys of negative content score",
    "reversed": "pairs of keys not in the order of content; dropped pairs count as in order",
    "reversed_kept": "the same, of pairs that are both kept",
    "lifted": "pairs in which a key of negative content stands above one of positive content",
}
"""What goes wrong in attention, by the names that diagnose.jsonl has."""
