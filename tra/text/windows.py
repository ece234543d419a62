"""Choose the window of a stream for each training row: every token once an epoch, in an order that needs no table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tra.tasks import stream_seed

FEISTEL_ROUNDS = 6
Indices = npt.NDArray[np.int64]


def windows_per_epoch(tokens: int, window: int) -> int:
    """Return how many windows an epoch has, each with a last target: the same wherever the first begins."""
    return (tokens - window) // window


def training_windows(rows: Indices, tokens: int, window: int, seed: int) -> Indices:
    """Return the first token of the window of each row of a run, counted from the run's start.

    An epoch visits every window from a random offset on once: every token is a target once, but for less than two
    windows of tokens at the ends of the stream.
    """
    windows = windows_per_epoch(tokens, window)
    epochs, indices = np.divmod(rows, windows)
    starts = np.empty_like(rows)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        offset = stream_seed(seed, "text/offset", int(epoch)) % window
        order = shuffled(indices[of_epoch], windows, stream_seed(seed, "text/order", int(epoch)))
        starts[of_epoch] = offset + window * order
    return starts


def shuffled(indices: Indices, size: int, key: int) -> Indices:
    """Return where a shuffle of 0..size-1 moves some indices: one to one, without a table.

    A Feistel network (Luby and Rackoff 1988) over the next power of four, repeated for results that are out of range.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64(2**half - 1)
    found = indices.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        value = found[outside]
        left, right = value >> np.uint64(half), value & mask
        for number in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (_hash(right, key + number) & mask)
        found[outside] = (left << np.uint64(half)) | right
        outside[outside] = found[outside] >= size
    return found.astype(np.int64)


def _hash(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Return splitmix64 (Steele et al. 2014) of each value and the key."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(key * 0x9E3779B97F4A7C15 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
