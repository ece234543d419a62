"""Symbols that tasks share: special ones for tasks that answer after a separator, and letters."""

from __future__ import annotations

PAD, BOS, SEP, EOS = range(4)
SPECIAL_SYMBOLS = ("<pad>", "<bos>", "<sep>", "<eos>")
FIRST_ID = len(SPECIAL_SYMBOLS)
"""Id of the first symbol that is not special."""

MAX_SYMBOLS = 2**20
"""Most symbols of a task: each has a name, a row of the embedding and one of the head."""


def letters(count: int) -> tuple[str, ...]:
    """Return `count` distinct symbols: a, b, … z, then a1, b1, …"""
    if not 2 <= count <= MAX_SYMBOLS:
        raise ValueError(f"an alphabet needs at least 2 symbols, and at most {MAX_SYMBOLS:,}; got {count}")
    names = "abcdefghijklmnopqrstuvwxyz"
    return tuple(names[i % 26] + (str(i // 26) if i >= 26 else "") for i in range(count))
