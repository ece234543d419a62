"""Launches the decode kernels, as an operator: few queries over many keys, the walk in pieces side by side.

One query alone would keep one program per head busy. Here the keys are divided into pieces that are walked at the same
time and merged exactly. Heads that forget need only the newest keys, so pieces come in phases, from the newest keys on:
a piece of a later phase compares with what the former ones found, and stops at once where the keys left provably don't
count. Launches depend on shapes alone; lengths are read on the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tra.ops import compiler_workarounds
from tra.ops.options import AttentionOptions
from tra.ops.triton import block_shapes, decode_plan
from tra.ops.triton.block_shapes import ForwardTile
from tra.ops.triton.direct_launch import TRITON, Launcher
from tra.ops.triton.launch import (
    cuts,
    device_guard,
    empty_out,
    kernel_constants,
    logit_unit,
    padded,
    power_of_two,
    rows_contiguous,
)

MIN_GPU_WIDTH = 64
"""Columns of queries and keys on a GPU in half precision, the rest zeros: what was tested on an H200."""
MAX_FIXED_SPAN = 126 - 24
"""Powers of two between a row's highest and lowest score up to which its reference is fixed."""
MAX_HEADROOM = 30
"""Powers of two that float32 weights leave for the number of keys, see `_headroom`."""
MAX_FORMER_NUMBERS, MAX_MERGED_NUMBERS = 2048, 8192
"""Numbers that fit a program's registers: former pieces times rows, and in the merge pieces times columns."""


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    key_mask: Tensor | None,
    options: AttentionOptions,
    tile: ForwardTile | None = None,
    piece: int | None = None,
    out: Tensor | None = None,
    launcher: Launcher = TRITON,
    block_table: Tensor | None = None,
    max_keys: int | None = None,
) -> Tensor:
    """Return what `tra::decode` returns, in `out` if given.

    A `tile` or `piece` says how keys are divided.
    """
    early = _may_stop(options)
    n_keys = _keys_to_plan(key, block_table, max_keys)
    n_rows = query.shape[2] * query.shape[1] // key.shape[1]
    query, key, value = rows_contiguous(query), _aligned(key), _aligned(value)
    out = empty_out(query, value.shape[3]) if out is None else out
    constants = _constants(query, key, value, first, key_mask, options)
    mask = None if key_mask is None else key_mask.view(torch.uint8)
    table = None if block_table is None else block_table.contiguous()
    tensors = (query, key, value, log_forget, first, last, mask, table)

    def launch_with(tile: ForwardTile) -> None:
        n_blocks, heads = -(-n_keys // tile.keys), query.shape[0] * key.shape[1]
        processors = decode_plan.processor_count(key.device)
        plan = decode_plan.phases(n_blocks, heads, tile.keys, processors, early, piece)
        tile = tile._replace(rows=max(tile.rows, padded(n_rows)))
        _launch(tensors, out, options, constants, tile, plan, launcher)

    with device_guard(query.device):
        if tile is not None:
            launch_with(tile)
        else:
            tiles = decode_plan.decode_tiles(constants["BD"], constants["BDV"], query.element_size(), query.device)
            page_size = 0 if table is None else key.shape[2]
            kind = ("decode", query.device, query.dtype, n_rows, early, page_size, *constants.values())
            block_shapes.run(kind, n_keys, tiles, launch_with)
    return out


def _keys_to_plan(key: Tensor, block_table: Tensor | None, max_keys: int | None) -> int:
    """Return the most keys that a walk may read: all slots, or of pages those in which queries see a key."""
    if block_table is None:
        return key.shape[2]
    capacity = block_table.shape[1] * key.shape[2]
    return capacity if max_keys is None else min(capacity, max_keys) + key.shape[2]


def _may_stop(options: AttentionOptions) -> bool:
    """Say whether walks may stop. Without a promise the bound would need the norms of all keys: as much to read."""
    return options.tolerance > 0 and options.score_bound is not None


def _constants(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor | None, key_mask: Tensor | None, options: AttentionOptions
) -> dict[str, Any]:
    constants = kernel_constants(query, value, first, options)
    del constants["DROPOUT"]
    half = query.dtype != torch.float32
    if half and query.is_cuda:
        constants["BD"] = max(constants["BD"], MIN_GPU_WIDTH)
    numbers = (query.shape[3], value.shape[3], *key.stride()[:3], *value.stride()[:3])
    return constants | {
        "MASKED": key_mask is not None,
        "FIXED_REFERENCE": _reference_is_fixed(query.dtype, options.score_bound),
        "STRIDE_UNIT": math.gcd(compiler_workarounds.MAX_STRIDE_UNIT, *numbers) if half else 1,
    }


def _launch(
    tensors: tuple[Tensor | None, ...],
    out: Tensor,
    options: AttentionOptions,
    constants: dict[str, Any],
    tile: ForwardTile,
    plan: list[decode_plan.Phase],
    launcher: Launcher,
) -> None:
    """Walk the pieces of all phases, and merge them if there are several."""
    from tra.ops.triton import decode_kernels

    launcher.begin()
    q, k, v, log_forget, first, last, mask, table = tensors
    assert q is not None and k is not None and v is not None and log_forget is not None  # noqa: PT018
    page_blocks = 0 if table is None else k.shape[2] // tile.keys
    assert table is None or k.shape[2] % tile.keys == 0
    batch, heads, n_queries, _ = q.shape
    kv_heads, n_keys, value_width = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    pieces = sum(phase.pieces for phase in plan)
    one_piece = pieces == 1
    # Pieces that are all walked at once gain nothing by stopping.
    early = _may_stop(options) and (one_piece or len(plan) > 1)
    unit, stride_unit = logit_unit(q.dtype), constants["STRIDE_UNIT"]
    sums, stats = out, out  # not used
    if not one_piece:
        n_rows = batch * kv_heads * pieces * group * n_queries
        sums = launcher.empty(n_rows * value_width, torch.float32, q.device)
        stats = launcher.empty((4, n_rows), torch.float32, q.device)
    numbers = (
        options.scale * unit, *cuts(options), options.threshold * unit, (options.score_bound or 0.0) * unit,
        math.log(options.tolerance) * unit if _may_stop(options) else 0.0,
    )  # fmt: skip
    slots = n_keys if table is None else n_keys * table.shape[1]
    headroom = _headroom(q.dtype, options.score_bound, slots)
    former = 0
    for phase in plan:
        launcher.launch(
            decode_kernels.decode_kernel, (batch * kv_heads, phase.pieces),
            q, k, v, log_forget, first, last, mask, table, out, sums, stats,
            *q.stride()[:3], *(stride // stride_unit for x in (k, v) for stride in x.stride()[:3]),
            *log_forget.stride(), *((0, 0) if mask is None else mask.stride()), *out.stride()[:3], stats.stride(0),
            n_queries, n_keys, kv_heads, group, *numbers, headroom, *phase[1:], former, pieces,
            None if table is None else table.shape[1],
            **constants, EARLY=early, LATER_PHASE=former > 0, ONE_PIECE=one_piece,
            PIECES_AT_ONCE=max(16, min(MAX_FORMER_NUMBERS // tile.rows, power_of_two(former))),
            PAGE_BLOCKS=page_blocks, BM=tile.rows, BN=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        former += phase.pieces
    if one_piece:
        return
    columns = max(16, min(constants["BDV"], MAX_MERGED_NUMBERS // power_of_two(pieces)))
    launcher.launch(
        decode_kernels.merge_kernel, (batch * heads * n_queries, -(-value_width // columns)),
        log_forget, sums, stats, out, *log_forget.stride(), *out.stride()[:3], stats.stride(0),
        n_queries, heads, group, headroom, pieces,
        DV=value_width, BP=power_of_two(pieces), BDV=columns, FLOAT32=constants["FLOAT32"],
    )  # fmt: skip


def _aligned(x: Tensor) -> Tensor:
    """Return x, or a copy unless its rows are whole and, in half precision, begin at even numbers, 16-byte aligned."""
    even = all(stride % 2 == 0 for stride in x.stride()[:3]) and x.data_ptr() % 16 == 0
    whole = x.stride(-1) == 1 and (even or x.dtype == torch.float32)
    return x if whole else x.clone(memory_format=torch.contiguous_format)


def _reference_is_fixed(dtype: torch.dtype, score_bound: float | None) -> bool:
    """Return whether a row's slope δ is the reference of its weights, instead of a running maximum.

    A piece's first kept key then weighs at least 2^-B, B the bound in powers of two, and none more than 2^B. What is
    flushed, below 2^-126 in float32 and bfloat16, is at most 2^(2B - 126) of a row: 2^-24 where 2B <= MAX_FIXED_SPAN,
    less what float32 leaves as headroom. Small weights of float16 would lose digits. Values of bfloat16 overflow where
    their sum, before it is divided by that of the weights, does: from 1e35 on with B of 8.
    """
    span = MAX_FIXED_SPAN - (MAX_HEADROOM if dtype == torch.float32 else 0)
    return dtype != torch.float16 and score_bound is not None and 2 * score_bound * math.log2(math.e) <= span


def _headroom(dtype: torch.dtype, score_bound: float | None, n_keys: int) -> float:
    """Return the power of two by which float32 weights are divided when they meet values; elsewhere 1.

    A weight is at most 1, or 2^B with a fixed reference, so a sum of values near the largest float doesn't overflow.
    Multiplied by a power of two, sums keep all their digits.
    """
    if dtype != torch.float32:
        return 1.0
    highest = score_bound * math.log2(math.e) if score_bound and _reference_is_fixed(dtype, score_bound) else 0.0
    return 2.0 ** (math.ceil(highest) + min(n_keys.bit_length(), MAX_HEADROOM))


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
    margin: float,
    score_bound: float | None,
    tolerance: float,
    block_table: Tensor | None = None,
    max_keys: int | None = None,
) -> Tensor:
    """Return `[B, H, Tq, Dv]`. Ranges are `[B, Tq]` int32, `key_mask` `[B, Tk]`; slots outside aren't read.

    With a `block_table` `[B, N]` int32, `key` and `value` are pages `[P, Hkv, page_size, D]`, and key t of a row is at
    page `block_table[b, t // page_size % N]`. `max_keys` is then the most keys that lie between the first and the last
    that a row's queries see; None is all that fit the table, from key 0 on.
    """
    options = AttentionOptions(scale, threshold, score_bound, tolerance=tolerance, margin=margin)
    table = {"block_table": block_table, "max_keys": max_keys}
    return decode_attention(query, key, value, log_forget, first, last, key_mask, options, **table)  # type: ignore[arg-type]


@_decode.register_fake
def _(query, key, value, *_rest):  # type: ignore[no-untyped-def]
    return empty_out(query, value.shape[3])
