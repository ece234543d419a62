"""Name mechanisms and measures, and give mechanisms colours, for figures and the page alike."""

from __future__ import annotations

from collections.abc import Iterable

from tra.runs import mechanism_of, settings_of

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

UNKNOWN_COLOUR = "#7F7F7F"
"""Colour of a user's mechanism."""

_VIOLET = "#8E24AA"

FAILURES = {
    "negative_mass": "mass on keys of negative content score",
    "reversed": "pairs of keys not in the order of content; dropped pairs count as in order",
    "reversed_kept": "the same, of pairs that are both kept",
    "lifted": "pairs in which a key of negative content stands above one of positive content",
}
"""Descriptions of the failures of attention, by their names in diagnose.jsonl."""


TASK_SENTENCES = {
    "flipflop": "The task is flip-flop: remember the bit that was written last, through noise.",
    "copy": "The task is copy: repeat the input.",
    "induct": "The task is induct: find what followed a symbol.",
    "instruct": "The task is instruct: carry out one of seven operations on a list.",
    "latest": "The task is latest: give the latest value of a key, through noise.",
    "mqar": "The task is multi-query associative recall: give the values that came with keys.",
    "text": "The task is language: predict the next token of a text.",
}
"""What is learnt, by task."""

SPLIT_WORDS = {"iid": "as trained", "sparse": "more noise", "dense": "less noise"}
"""What is asked in test sets whose names don't say it."""


def task_sentence(task: str) -> str:
    """Return what is learnt, in one sentence."""
    return TASK_SENTENCES.get(task, f"The task is {task}.")


def name_of(variant: str) -> str:
    """Return the name of a variant for people: `TRA`, `TRA, margin ∞`. A user's mechanism keeps its name."""
    mechanism = mechanism_of(variant)
    settings = variant[len(mechanism) :].replace("-", "−").replace("inf", "∞")
    return NAMES.get(mechanism, mechanism) + settings


def table_order(variants: Iterable[str]) -> list[str]:
    """Return variants in the order of tables: by mechanism, built-in ones first, then by threshold and margin."""
    found = list(dict.fromkeys(variants))
    mechanisms = [*NAMES, *map(mechanism_of, found)]
    return sorted(found, key=lambda variant: (mechanisms.index(mechanism_of(variant)), settings_of(variant)))


def colours_of(variants: Iterable[str]) -> dict[str, str]:
    """Return a colour for each variant: its mechanism's colour for the first, shades towards violet for the others."""
    by_mechanism: dict[str, list[str]] = {}
    for variant in table_order(variants):
        by_mechanism.setdefault(mechanism_of(variant), []).append(variant)
    return {
        variant: _mixed(COLOURS.get(mechanism, UNKNOWN_COLOUR), number / max(1, len(found) - 1))
        for mechanism, found in by_mechanism.items()
        for number, variant in enumerate(found)
    }


def _mixed(colour: str, share: float) -> str:
    """Return a colour mixed with a share of violet."""
    pairs = ((int(colour[at : at + 2], 16), int(_VIOLET[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(own + share * (violet - own)):02X}" for own, violet in pairs)


def overlap_text(text: str, overlap: str) -> str:
    """Return how a text was read: `wiki, windows side by side`."""
    return f"{text}, {'windows side by side' if overlap == 'none' else f'windows that overlap by {overlap}'}"


def training_title(several: bool) -> str:
    """Return what a curve of the training loss shows, of several seeds or of one."""
    return "training loss, geometric mean" if several else "training loss"
