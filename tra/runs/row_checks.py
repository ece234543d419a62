"""Check the types of what a row of metrics or results holds."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

NUMBERS: dict[str, tuple[str, ...]] = {
    "metrics.jsonl": ("step", "loss"),
    "eval.jsonl": ("shortest", "longest", "examples", "exact", "low", "high"),
    "diagnose.jsonl": ("shortest", "longest"),
    "perplexity.jsonl": ("window", "loss", "perplexity"),
}
"""Numbers that a row of a file must have."""

WORDS: dict[str, tuple[str, ...]] = {
    "eval.jsonl": ("split",),
    "diagnose.jsonl": ("split",),
    "perplexity.jsonl": ("text", "overlap"),
}
"""Strings that a row of a file must have."""

OPTIONAL_NUMBERS = ("low", "high", "tokens", "documents", "word_perplexity", "byte_perplexity", "bits_per_byte", "lr",
                    "tokens_per_second", "accuracy", "exact", "seconds", "seed")  # fmt: skip
"""Numbers that a row may have, or null."""

GRIDS = (
    "negative_mass",
    "reversed",
    "reversed_kept",
    "lifted",
    "kept",
    "counted",
    "null",
    "log_forget",
    "reach",
    "walked",
)
"""Measures `[layer][head]` that a row may have, or null."""

LISTS = {"by_position": 3, "by_document": 2}
"""Lists of numbers of this many columns that a row may have, or null."""


def row_problem(file: str, row: Any, needed: Sequence[str] | None = None) -> str | None:
    """Return what is wrong with a row of a file of this name, None if nothing is.

    A loss in metrics.jsonl may be infinite or not a number: that is a fact of the run.

    Args:
        needed: Keys that the row must have; by default all that are listed above.
    """
    if not isinstance(row, Mapping):
        return f"it must be an object, got {type(row).__name__}"
    words, numbers = WORDS.get(file, ()), NUMBERS.get(file, ())
    if needed is not None:
        if missing := [key for key in needed if key not in row]:
            return f"it has no {missing[0]}"
        words, numbers = (tuple(key for key in keys if key in row) for keys in (words, numbers))
    for key in words:
        if not isinstance(row.get(key), str):
            return f"{key} must be a string, got {reprlib.repr(row.get(key))}"
    for key in numbers:
        may_diverge = file == "metrics.jsonl" and key == "loss" and isinstance(row.get(key), float)
        if not may_diverge and not is_finite(row.get(key)):
            return f"{key} must be a number, got {reprlib.repr(row.get(key))}"
    for key in OPTIONAL_NUMBERS:
        if key not in numbers and not _is_number_or_null(row.get(key)):
            return f"{key} must be a number or null, got {reprlib.repr(row[key])}"
    for key in (*GRIDS, *LISTS):
        if row.get(key) is not None and not _is_table(row[key], LISTS.get(key)):
            return f"{key} must be lists of numbers, got {reprlib.repr(row[key])}"
    return None


def _is_table(value: Any, columns: int | None) -> bool:
    """Return whether a value is a list of equally long lists of numbers and nulls, none empty."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return False
    widths = {len(row) for row in value} if columns is None else {columns, *map(len, value)}
    return (
        (columns is not None or value != [])
        and len(widths) == 1
        and 0 not in widths
        and all(_is_number_or_null(item) for row in value for item in row)
    )


def _is_number_or_null(value: Any) -> bool:
    """Return whether a value is null, or a number: it may be infinite or NaN, as that of a run that diverged."""
    return value is None or isinstance(value, float) or is_finite(value)


def is_finite(value: Any) -> bool:
    """Return whether a value is a number that fits a float, and neither infinite nor NaN."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of more than 308 digits
        return False
