"""Few queries over many keys: the walk in pieces side by side, as an operator.

One query alone would keep one program per head busy. Here the keys are cut into pieces that are walked at the same time
and merged exactly. Heads that forget need a short tail of the keys, so pieces come in phases, from the newest keys on:
a piece of a later phase looks at what the former ones have found, and leaves at once where the rest provably doesn't
count. Launches depend on shapes alone; lengths are read on the device. `_decode_kernel.py` has the kernels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tra.ops.raw_threshold import cut
from tra.ops.triton import block_shapes as _tiles
from tra.ops.triton.block_shapes import Forward
from tra.ops.triton.launch import LOG2_E, empty_out, on, padded, rows_contiguous

MOST_QUERIES = 16
"""Per head. More are a prompt: neighbouring rows that the forward kernel takes 64 at a time, with keys read once."""
MOST_ROWS = 64
"""Queries times heads that share a key head: what one program holds. Beyond, the forward kernel fills its blocks."""
PIECE = 256
"""Keys of a piece in the first phase, and at least on full walks; half of it over few keys."""
FEW_KEYS = 2048
"""Up to here it pays to have more programs with less to walk."""
LATER_PIECE = 512
"""The least keys of a piece in later phases, where most pieces leave at once."""
LEAST_LATER = 4
"""Pieces of a later phase, however many heads there are: one that hardly forgets shouldn't be a single walk."""
FIRST_PIECES, MOST_PIECES = 16, 128
"""Of the first phase, and of any other, per key head: more would cost the merge more than they gain."""
ALONE, ALONE_FULL = 2048, 1024
"""Keys up to which one piece per head is enough, on walks that may stop and on full ones, if heads alone keep every
processor busy: what is saved is the merge."""
LONG_PIECE = 2048
"""Keys from which on a piece of a full walk needs no others to even it out: three programs per processor, at once."""
GROWTH = 4096
"""How many times the keys of former phases a phase ends at: two phases up to a million keys and more."""

TILES: dict[tuple[int, int], tuple[Forward, ...]] = {
    # (bytes per number, widest head): best first. 64 keys are what Hopper's products take at once, as in the forward.
    (2, 64): (Forward(16, 64, 4, 3), Forward(16, 64, 4, 2)),
    (2, 128): (Forward(16, 64, 4, 3), Forward(16, 64, 4, 2)),
    (2, 256): (Forward(16, 64, 4, 2), Forward(16, 32, 4, 2)),
    (4, 64): (Forward(16, 32, 4, 2), Forward(16, 16, 4, 1)),
    (4, 128): (Forward(16, 32, 4, 2), Forward(16, 16, 4, 1)),
    (4, 256): (Forward(16, 16, 4, 2), Forward(16, 16, 4, 1)),
}
"""Rows are the least that a block has; more queries take the next power of two."""
UNIT = 8
"""Numbers that rows of keys and values are a multiple of, or the largest part of it that they are, for the kernel to
know. Rows of 24 are not a multiple of 16, which is all that Triton asks of its own accord, so it copied keys through
registers, number by number, and products of 64 such keys were wrong on an H200. The PTX is right; by its SASS, ptxas
12.8.93, which Triton 3.6 brings, loses the address of a buffer that such keys share with what comes after them (12.9
doesn't). Two numbers, four bytes, are the least that can be copied without waiting, into buffers of their own."""
NARROWEST = 64
"""Columns of queries and keys on a GPU, the rest zeros, as an H200 has been tested with."""
INTERPRETED = (Forward(16, 32, 4, 1),)
SPAN = 126 - 24
"""Powers of two between a row's highest and lowest score up to which its reference needn't run: see `_fixed`."""
ASKED_AT_ONCE, MERGED_AT_ONCE = 2048, 8192
"""Numbers that fit a program's registers: former pieces times rows, and in the merge pieces times columns."""


class Phase(NamedTuple):
    """Key blocks walked side by side: `span` of them, the newest `start` blocks from the newest key."""

    pieces: int
    start: int
    span: int
    least: int  # blocks of a piece


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there are few enough queries, of heads whose rows can be copied four bytes at a time (see UNIT)."""
    heads, n_queries, width = query.shape[1:]
    if query.dtype != torch.float32 and (width % 2 or value.shape[3] % 2):
        return False
    return n_queries <= MOST_QUERIES and n_queries * (heads // key.shape[1]) <= MOST_ROWS


def phases(
    n_blocks: int, heads: int, block: int, processors: int, early: bool, piece: int | None = None
) -> list[Phase]:
    """How `n_blocks` blocks of `block` keys are cut, for `heads` key heads in the batch.

    With a `piece`, into pieces of that many keys or more, even where fewer launches would do.

    The first phase gives every processor two programs; later ones three, which it holds at once, as most of them leave;
    full walks up to sixteen, which even out, or three that are long.
    """
    n_keys = n_blocks * block
    if piece is None:
        if heads >= processors and n_keys <= (ALONE if early else ALONE_FULL):
            return [Phase(1, 0, n_blocks, n_blocks)]
        if heads * n_blocks <= processors:  # all at once
            return [Phase(min(MOST_PIECES, n_blocks), 0, n_blocks, 1)]
        piece = PIECE // 2 if n_keys <= FEW_KEYS else PIECE
    shortest, later = max(1, piece // block), max(1, LATER_PIECE // block)
    if not early:
        most, long = (min(MOST_PIECES, -(-each * processors // heads)) for each in (16, 3))
        pieces = long if n_keys >= long * LONG_PIECE else min(most, -(-n_blocks // shortest))
        return [Phase(pieces, 0, n_blocks, shortest)]
    most_later = min(MOST_PIECES, max(LEAST_LATER, 3 * processors // heads))
    first = max(1, min(FIRST_PIECES, 2 * processors // heads))
    found = [Phase(min(first, -(-n_blocks // shortest)), 0, first * shortest, shortest)]
    start = first * shortest
    while start < n_blocks:
        span = min(start * (GROWTH - 1), n_blocks - start)
        found.append(Phase(min(most_later, -(-span // later)), start, span, later))
        start += span
    return found


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    key_mask: Tensor | None,
    *,
    scale: float,
    threshold: float,
    score_bound: float | None,
    tolerance: float,
    tile: Forward | None = None,
    piece: int | None = None,
) -> Tensor:
    """As `tra::decode`; with a `tile` or `piece` it is cut as these say instead of as shipped."""
    from tra.ops.triton import decode_kernels as _decode_kernel

    batch, heads, n_queries, width = query.shape
    kv_heads, n_keys, value_width = key.shape[1], key.shape[2], value.shape[3]
    group = heads // kv_heads
    rows = group * n_queries
    out = empty_out(query, value_width)
    # Without a promise the bound would need the norms of all keys: as much to read as the walk.
    early = tolerance > 0 and score_bound is not None
    exact = query.dtype == torch.float32
    unit = 1.0 if exact else LOG2_E
    bound = (score_bound or 0.0) * unit
    q, k, v = rows_contiguous(query), _aligned(key), _aligned(value)
    unit_of_rows = 1 if exact else math.gcd(UNIT, width, value_width, *k.stride()[:3], *v.stride()[:3])
    mask = None if key_mask is None else key_mask.view(torch.uint8)
    numbers = (scale * unit, cut(scale, threshold), bound, math.log(tolerance) * unit if early else 0.0)
    options: dict[str, Any] = {
        "D": width,
        "DV": value_width,
        "BD": max(padded(width), NARROWEST if q.is_cuda and not exact else 16),
        "BDV": padded(value_width),
        "RANGES": first is not None,
        "MASKED": mask is not None,
        "FIXED": _fixed(query.dtype, score_bound),
        "EXACT": exact,
        "UNIT": unit_of_rows,
        "PRECISION": "ieee",
    }

    def launch(tile: Forward) -> None:
        n_blocks = -(-n_keys // tile.keys)
        plan = phases(n_blocks, batch * kv_heads, tile.keys, _processors(q.device), early, piece)
        pieces = sum(phase.pieces for phase in plan)
        alone = pieces == 1
        asks = early and (alone or len(plan) > 1)  # pieces that are all walked at once gain nothing by stopping
        block_rows = max(tile.rows, padded(rows))
        parts, stats = out, out  # not used
        if not alone:
            parts = torch.empty(batch * kv_heads * pieces * rows * value_width, dtype=torch.float32, device=q.device)
            stats = torch.empty(4, batch * kv_heads * pieces * rows, dtype=torch.float32, device=q.device)
        before = 0
        for phase in plan:
            _decode_kernel.decode_kernel[(batch * kv_heads, phase.pieces)](
                q, k, v, log_forget, first, last, mask, out, parts, stats,
                *q.stride()[:3], *(stride // unit_of_rows for x in (k, v) for stride in x.stride()[:3]),
                *log_forget.stride(), *((0, 0) if mask is None else mask.stride()), *out.stride()[:3], stats.stride(0),
                n_queries, n_keys, kv_heads, group, *numbers, *phase[1:], before, pieces,
                **options, EARLY=asks, LATER=before > 0, ALONE=alone,
                CHUNK=max(16, min(ASKED_AT_ONCE // block_rows, _power_of_two(before))),
                BM=block_rows, BN=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
            before += phase.pieces
        if alone:
            return
        columns = max(16, min(options["BDV"], MERGED_AT_ONCE // _power_of_two(pieces)))
        _decode_kernel.merge_kernel[(batch * heads * n_queries, -(-value_width // columns))](
            log_forget, parts, stats, out, *log_forget.stride(), *out.stride()[:3], stats.stride(0),
            n_queries, heads, group, pieces, DV=value_width, BP=_power_of_two(pieces), BDV=columns, EXACT=exact,
        )  # fmt: skip

    with on(q.device):
        if tile is not None:
            launch(tile)
        else:
            kind = ("decode", q.device, query.dtype, rows, early, *options.values())
            _tiles.run(kind, n_keys, _candidates(options["BD"], options["BDV"], q), launch)
    return out


def _aligned(x: Tensor) -> Tensor:
    """As it is if its rows are whole and, in half precision, begin at even numbers from an aligned address."""
    even = all(stride % 2 == 0 for stride in x.stride()[:3]) and x.data_ptr() % 16 == 0
    whole = x.stride(-1) == 1 and (even or x.dtype == torch.float32)
    return x if whole else x.clone(memory_format=torch.contiguous_format)


def _fixed(dtype: torch.dtype, score_bound: float | None) -> bool:
    """Whether a row's slope δ serves as the reference of its weights, so that none has to run.

    A piece's first kept key then weighs at least 2^-B, B the bound in powers of two, and none more than 2^B. What is
    flushed, below 2^-126 in float32 and bfloat16, is at most 2^(2B - 126) of a row: 2^-24 where 2B <= SPAN. Small
    weights of float16 would lose digits. Values that 2^B takes beyond the largest float overflow: 1e35 with B of 8.
    """
    return dtype != torch.float16 and score_bound is not None and 2 * score_bound * math.log2(math.e) <= SPAN


def _candidates(width: int, value_width: int, query: Tensor) -> tuple[Forward, ...]:
    if query.device.type == "cpu":
        return INTERPRETED
    return tuple(_tiles.candidates(TILES, width, value_width, query.element_size(), query.device))


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@torch.library.custom_op("tra::decode", mutates_args=())
def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    threshold: float,
    score_bound: float | None,
    tolerance: float,
) -> Tensor:
    """`[B, H, Tq, Dv]`. Ranges are `[B, Tq]` int32, and `key_mask` `[B, Tk]`; slots outside of both aren't read."""
    return attend(
        query,
        key,
        value,
        log_forget,
        first,
        last,
        key_mask,
        scale=scale,
        threshold=threshold,
        score_bound=score_bound,
        tolerance=tolerance,
    )


@_decode.register_fake
def _(query, key, value, *_rest):  # type: ignore[no-untyped-def]
    return empty_out(query, value.shape[3])
