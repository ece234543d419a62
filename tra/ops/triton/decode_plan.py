"""How decoding divides a cache into phases of pieces, and the shapes of its blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tra.ops.triton.block_shapes import ForwardTile, candidates

PIECE_KEYS = 256
"""Keys of a piece in the first phase, and the fewest on full walks; half of it in a short cache."""
MAX_SHORT_KEYS = 2048
"""Up to here a cache is short: more programs with fewer keys each are faster."""
LATER_PIECE_KEYS = 512
"""The fewest keys of a piece in later phases, where most pieces stop at once."""
MIN_LATER_PIECES = 4
"""Pieces of a later phase with many heads: a head that hardly forgets shouldn't be a single walk."""
MAX_FIRST_PIECES, MAX_PIECES = 16, 128
"""Most pieces of the first phase and of any other, per key head. More would cost the merge more than they save."""
MAX_ONE_PIECE_KEYS, MAX_ONE_PIECE_KEYS_FULL = 2048, 1024
"""Up to here one piece per head is enough, on walks that may stop and on full ones, if there are enough heads to keep
every processor busy. It saves the merge."""
LONG_PIECE_KEYS = 2048
"""Keys from which pieces of a full walk are even enough: three per processor, which it holds at once."""
PHASE_GROWTH = 4096
"""A phase ends at this many times the keys of earlier phases, which gives two phases for a million keys and more."""

TILES: dict[tuple[int, int], tuple[ForwardTile, ...]] = {
    # (bytes per number, widest head): best first. Hopper's products take 64 keys at once, as in the forward.
    (2, 64): (ForwardTile(16, 64, 4, 3), ForwardTile(16, 64, 4, 2)),
    (2, 128): (ForwardTile(16, 64, 4, 3), ForwardTile(16, 64, 4, 2)),
    (2, 256): (ForwardTile(16, 64, 4, 2), ForwardTile(16, 32, 4, 2)),
    (4, 64): (ForwardTile(16, 32, 4, 2), ForwardTile(16, 16, 4, 1)),
    (4, 128): (ForwardTile(16, 32, 4, 2), ForwardTile(16, 16, 4, 1)),
    (4, 256): (ForwardTile(16, 16, 4, 2), ForwardTile(16, 16, 4, 1)),
}
"""Rows are the fewest of a block; more queries take the next power of two."""
INTERPRETED = (ForwardTile(16, 32, 4, 1),)


class Phase(NamedTuple):
    """Key blocks that are walked side by side."""

    pieces: int
    start: int  # the newest block is so many blocks from the newest key
    blocks: int
    min_blocks: int  # of a piece


def phases(
    n_blocks: int, heads: int, block: int, processors: int, early: bool, piece: int | None = None
) -> list[Phase]:
    """Divide `n_blocks` blocks of `block` keys, for `heads` key heads in the batch.

    The first phase gives every processor two programs. Later ones give it three, which it holds at once, as most of
    them stop. Full walks give it up to sixteen, which evens them out, or three long ones. With a `piece`, pieces have
    that many keys or more, even where fewer launches would do.
    """
    n_keys = n_blocks * block
    if piece is None:
        if heads >= processors and n_keys <= (MAX_ONE_PIECE_KEYS if early else MAX_ONE_PIECE_KEYS_FULL):
            return [Phase(1, 0, n_blocks, n_blocks)]
        if heads * n_blocks <= processors:  # all at once
            return [Phase(min(MAX_PIECES, n_blocks), 0, n_blocks, 1)]
        piece = PIECE_KEYS // 2 if n_keys <= MAX_SHORT_KEYS else PIECE_KEYS
    min_blocks, min_later_blocks = max(1, piece // block), max(1, LATER_PIECE_KEYS // block)
    if not early:
        most, long = (min(MAX_PIECES, -(-each * processors // heads)) for each in (16, 3))
        pieces = long if n_keys >= long * LONG_PIECE_KEYS else min(most, -(-n_blocks // min_blocks))
        return [Phase(pieces, 0, n_blocks, min_blocks)]
    max_later = min(MAX_PIECES, max(MIN_LATER_PIECES, 3 * processors // heads))
    max_first = max(1, min(MAX_FIRST_PIECES, 2 * processors // heads))
    start = max_first * min_blocks
    plan = [Phase(min(max_first, -(-n_blocks // min_blocks)), 0, start, min_blocks)]
    while start < n_blocks:
        blocks = min(start * (PHASE_GROWTH - 1), n_blocks - start)
        plan.append(Phase(min(max_later, -(-blocks // min_later_blocks)), start, blocks, min_later_blocks))
        start += blocks
    return plan


def decode_tiles(width: int, value_width: int, itemsize: int, device: torch.device) -> tuple[ForwardTile, ...]:
    """Return the shapes of blocks for a head width that fit the device, best first."""
    if device.type == "cpu":
        return INTERPRETED
    return tuple(candidates(TILES, width, value_width, itemsize, device))


def processor_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
