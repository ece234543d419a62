"""The walk, as a Triton kernel. Names and units are those of `_kernel_parts.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from tra.ops.triton.kernel_parts import (
    FAR,
    LOG2_E,
    SIZES,
    dropout_columns,
    dropout_rows,
    forgotten,
    head_and_block,
    leftmost,
    load_tile,
    log,
    mix,
    power,
    ranges,
    slopes,
    store_tile,
    weights,
)

MOST = tl.constexpr(32.0)
"""A walk is asked whether to stop after so many key blocks and one, at most."""


@triton.jit
def _forward_block(
    b_q, b_o, b_total, b_ref, b_count, b_slope, b_first, b_last, b_row, triangle, p_k, p_v, SEED, j,
    stride_k, stride_v, n_keys, score_scale, cut, drop_below,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    RANGES: tl.constexpr, ONLINE: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the walk: key block j."""
    o_k = j * BN + tl.arange(0, BN)
    b_k = load_tile(p_k, j * BN, stride_k, n_keys, D, BD, BN, MASKED)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BD] @ [BD, BN] -> [BM, BN]
    b_one = tl.where(b_s <= cut, 0.0, 1.0)  # 1 for a kept key; a NaN is kept, so that it shows
    if MASKED:
        b_one = tl.where(o_k[None, :] <= b_last[:, None], b_one, 0.0)
        if RANGES:
            b_one = tl.where(o_k[None, :] >= b_first[:, None], b_one, 0.0)
    b_ones = b_one.to(triangle.dtype)
    b_n = tl.dot(b_ones, triangle)  # [BM, BN] @ [BN, BN] -> [BM, BN]: kept keys from j to the block's end
    if ONLINE:
        b_x = b_s * score_scale + (b_slope[:, None] * b_n + (b_slope * b_count)[:, None])
        b_x = tl.where(b_one > 0.0, b_x, float("-inf"))
        b_new = tl.maximum(b_ref, tl.max(b_x, 1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink = power(b_ref - b_safe, EXACT)
        b_p = power(b_x - b_safe[:, None], EXACT)
        b_total = b_total * b_shrink[:, None]
        b_o = b_o * b_shrink[:, None]
        b_ref = b_new
    else:
        b_x = b_s * score_scale + (b_slope[:, None] * b_n + (b_slope * b_count - b_ref)[:, None])
        if not MASKED and triangle.dtype == tl.bfloat16:  # which holds every power: two products in one instruction
            b_p = power(b_x, EXACT).to(tl.bfloat16) * b_ones
        else:
            b_p = weights(b_x, b_one, MASKED, ONLINE, EXACT)
    b_v = load_tile(p_v, j * BN, stride_v, n_keys, DV, BDV, BN, MASKED)
    if EXACT:
        b_total += tl.sum(b_p, 1)[:, None]
    else:
        b_total = tl.dot(b_p.to(b_v.dtype), tl.full([BN, 16], 1.0, b_v.dtype), b_total)  # [BM, BN] @ [BN, 16]
    b_count += leftmost(b_n)  # the count of the block's first key is the block's
    if DROPOUT:
        b_stays = mix(b_row[:, None] ^ dropout_columns(SEED, o_k)[None, :]) >= drop_below.to(tl.uint32)
        b_p = tl.where(b_stays, b_p, 0.0)  # scaled up at the end: a half might not hold it
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)  # [BM, BN] @ [BN, BDV] -> [BM, BDV]
    return b_o, b_total, b_ref, b_count


@triton.jit
def _walk(
    b_q, b_o, b_total, b_ref, b_count, b_slope, b_bound, b_geometric, b_first, b_last, b_row, triangle, p_k, p_v, SEED,
    j, oldest, steps, end, stride_k, stride_v, n_keys, score_scale, cut, log_tolerance, drop_below,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    RANGES: tl.constexpr, ONLINE: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From key block j down to `end`, or to where the rest provably doesn't count: then `oldest` becomes that block.

    `steps` blocks are taken at a time, as an inner loop can be pipelined; then it is asked whether to stop, and if not,
    for how many more blocks there is no use in asking, by the rate at which the slowest row keeps keys (half of the
    keys, as long as it has seen few).
    """
    while j >= tl.maximum(end, oldest):
        now = tl.minimum(steps, j - tl.maximum(end, oldest) + 1)
        for step in range(now):
            b_o, b_total, b_ref, b_count = _forward_block(
                b_q, b_o, b_total, b_ref, b_count, b_slope, b_first, b_last, b_row, triangle, p_k, p_v, SEED, j - step,
                stride_k, stride_v, n_keys, score_scale, cut, drop_below,
                D, DV, BD, BDV, BN, MASKED, RANGES, ONLINE, EXACT, DROPOUT, PRECISION,
            )  # fmt: skip
        j -= now
        if EARLY:
            b_left = ((j + 1) * BN - b_first).to(tl.float32)  # keys to the left in a row's range, or more
            b_decay = b_slope * (b_count + 1.0)
            b_rest = b_bound + b_decay + log(tl.minimum(tl.maximum(b_left, 1.0), b_geometric), EXACT)
            b_rest += (1.0 + tl.abs(b_bound) + tl.abs(b_decay)) * 1e-6  # more than what rounding can hide
            b_excess = b_rest - (b_ref + log(tl.max(b_total, 1), EXACT) + log_tolerance)
            m_going = (b_left > 0) & ~(b_excess < 0.0)
            b_walked = (b_last - (j + 1) * BN).to(tl.float32)
            b_excess = tl.minimum(b_excess, -1.5 * log_tolerance)  # a row that has kept nothing yet
            b_keys = b_excess / tl.minimum(b_slope, -1e-30) * (b_walked + 64.0) / (-b_count - 32.0)
            b_keys = tl.where(b_keys < MOST * BN, tl.maximum(b_keys, 1.0), MOST * BN)  # a NaN walks on
            b_more = tl.where(m_going, b_keys, 0.0)
            more = tl.max(b_more)
            steps = (more * (1.0 / BN)).to(tl.int32) + 1
            if more == 0.0:
                oldest = j + 1
    return b_o, b_total, b_ref, b_count, j, oldest, steps


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["together"])
def forward_kernel(
    Q, K, V, FORGET, FIRST, LAST, LONGEST, SEED, OUT, LOW, REF, TOTAL, STOP,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_fb, stride_fh, stride_f, stride_ob, stride_oh, stride_o,
    together, n_queries, n_keys, heads, group, score_scale, cut, bound, log_tolerance, drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RANGES: tl.constexpr, ONLINE: tl.constexpr, NORMS: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
    DROPOUT: tl.constexpr, KEEP_LOW: tl.constexpr, SHIFT: tl.constexpr, STEEPEST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries walks its keys from right to left.

    Leaves, per row: the output, and what rounding cut off it (LOW, for backward's sake); REF and TOTAL, with weight =
    exp(logit - REF) / TOTAL, or for half precision REF alone; STOP, the oldest key read.
    """
    i_bh, i_m = head_and_block(tl.cdiv(n_queries, BM), together)
    start = i_m * BM
    i_b, i_h = (i_bh // heads).to(tl.int64), (i_bh % heads).to(tl.int64)
    p_k = K + i_b * stride_kb + i_h // group * stride_kh
    p_v = V + i_b * stride_vb + i_h // group * stride_vh
    o_m = start + tl.arange(0, BM)
    m_m = o_m < n_queries
    o_row = i_bh.to(tl.int64) * n_queries + o_m
    b_q = load_tile(Q + i_b * stride_qb + i_h * stride_qh, start, stride_q, n_queries, D, BD, BM, True)
    p_forget = FORGET + i_b * stride_fb + i_h * stride_fh + o_m.to(tl.int64) * stride_f
    b_slope = slopes(p_forget, m_m, ONLINE, EXACT, STEEPEST)
    b_first, b_last, newest, oldest, whole_from, whole_to = ranges(
        FIRST, LAST, i_b, start, n_queries, n_keys, BM, BN, RANGES
    )

    b_bound = tl.zeros([BM], tl.float32) + bound
    if NORMS:  # ‖q‖ · max ‖k‖, with the largest entry taken out so that squares don't underflow
        b_wide = tl.abs(b_q.to(tl.float32))
        b_most = tl.max(b_wide, 1)
        b_unit = b_wide / tl.where(b_most == 0.0, 1.0, b_most)[:, None]
        b_bound = bound * (b_most * tl.sqrt(tl.sum(b_unit * b_unit, 1)) * tl.load(LONGEST + i_bh // group))
    b_geometric = b_slope  # Σ exp(δ t) over t = 0, 1, ...: 1 / (1 - exp δ)
    if EARLY:
        b_forget = b_slope if EXACT else b_slope / LOG2_E
        b_geometric = 1.0 / forgotten(b_forget)
        b_first = tl.where(m_m & (b_last >= b_first), b_first, FAR)  # rows that see nothing hold nobody up

    b_ref = b_bound + b_slope - SHIFT  # no logit is higher: the nearest kept key has n = 1
    if ONLINE:
        b_ref = tl.full([BM], float("-inf"), tl.float32)
    b_row = dropout_rows(SEED, o_row) if DROPOUT else o_m
    o_n = tl.arange(0, BN)
    triangle = (o_n[:, None] >= o_n[None, :]).to(tl.bfloat16 if V.dtype.element_ty == tl.bfloat16 else tl.float16)
    b_count = tl.zeros([BM], tl.float32)
    b_total16 = tl.zeros([BM, 16], tl.float32)  # of the weights as rounded as they meet the values, in every column
    b_o = tl.zeros([BM, BDV], tl.float32)
    j, steps = newest, newest * 0 + FAR
    for PHASE in tl.static_range(3 if RANGES else 2):  # where rows end, whole blocks, where rows begin
        end = whole_to + 1 if PHASE == 0 else whole_from if PHASE == 1 else 0
        b_o, b_total16, b_ref, b_count, j, oldest, steps = _walk(
            b_q, b_o, b_total16, b_ref, b_count, b_slope, b_bound, b_geometric, b_first, b_last, b_row, triangle,
            p_k, p_v, SEED, j, oldest, steps, end, stride_k, stride_v, n_keys, score_scale, cut, log_tolerance,
            drop_below, D, DV, BD, BDV, BN, PHASE != 1, RANGES, ONLINE, EARLY, EXACT, DROPOUT, PRECISION,
        )  # fmt: skip
    b_total = tl.max(b_total16, 1)
    b_empty = b_total == 0.0
    b_total = tl.where(b_empty, 1.0, b_total)
    b_o = b_o / b_total[:, None]
    if DROPOUT:
        b_o *= drop_scale
    store_tile(OUT + i_b * stride_ob + i_h * stride_oh, start, stride_o, n_queries, b_o, DV, BDV, BM)
    if KEEP_LOW:
        b_low = b_o - b_o.to(OUT.dtype.element_ty).to(tl.float32)
        store_tile(LOW + i_b * stride_ob + i_h * stride_oh, start, stride_o, n_queries, b_low, DV, BDV, BM)
    b_ref = tl.where(b_empty, 1e30, b_ref)
    if EXACT:
        tl.store(TOTAL + o_row, b_total, mask=m_m)
    else:
        b_ref += tl.log2(b_total)
    tl.store(REF + o_row, b_ref, mask=m_m)
    tl.store(STOP + o_row, tl.zeros([BM], tl.int32) + tl.minimum(oldest, newest + 1) * BN, mask=m_m)
