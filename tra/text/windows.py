"""Which window of a stream a training row is: every token once an epoch, in an order that needs no memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tra.tasks import stream_seed

ROUNDS = 6
Places = npt.NDArray[np.int64]


def windows_per_epoch(tokens: int, window: int) -> int:
    """Windows of `window` tokens and a target each, wherever the first begins; the same number in every epoch."""
    return (tokens - window) // window


def training_windows(rows: Places, tokens: int, window: int, seed: int) -> Places:
    """First tokens of the windows that are a run's rows, counted from its start.

    An epoch is all windows from an offset of its own on, none twice: every token is a target once, but for less than
    two windows at the ends of the stream.
    """
    each = windows_per_epoch(tokens, window)
    epochs, places = np.divmod(rows, each)
    starts = np.empty_like(rows)
    for epoch in np.unique(epochs):
        mine = epochs == epoch
        offset = stream_seed(seed, "text/offset", int(epoch)) % window
        starts[mine] = offset + window * shuffled(places[mine], each, stream_seed(seed, "text/order", int(epoch)))
    return starts


def shuffled(places: Places, size: int, key: int) -> Places:
    """Where a shuffle of 0..size-1 puts some places: one to one, without a table.

    A Feistel network (Luby and Rackoff 1988) over the next power of four; what falls outside goes through again.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64(2**half - 1)
    found = places.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        value = found[outside]
        left, right = value >> np.uint64(half), value & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (_mixed(right, key + turn) & mask)
        found[outside] = (left << np.uint64(half)) | right
        outside[outside] = found[outside] >= size
    return found.astype(np.int64)


def _mixed(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """splitmix64 (Steele et al. 2014) of value and key."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(key * 0x9E3779B97F4A7C15 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
