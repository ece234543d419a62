"""The forward pass as a Triton kernel. Names and units are explained in `kernel_parts.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from tra.ops.triton.kernel_parts import (
    INFINITE,
    LARGE_INDEX,
    LOG2_E,
    NO_MARGIN,
    SIZES,
    counted_in_block,
    dropout_columns,
    dropout_rows,
    hash32,
    head_and_block,
    load_tile,
    log,
    one_minus_exp,
    ones_above,
    ones_triangle,
    power,
    slopes,
    store_tile,
    visible_ranges,
    weights,
)

HEADROOM = tl.constexpr(2.0**24)
"""In float32, most keys of equal weight whose values may all be the largest number."""
MAX_UNCHECKED_BLOCKS = tl.constexpr(32.0)
"""Largest estimate of key blocks until the bound is checked again."""


@triton.jit
def _forward_block(
    b_q, b_o, b_total, b_ref, b_count, b_slope, b_first, b_last, b_row, triangle, p_k, p_v, SEED, j,
    stride_k, stride_v, n_keys, score_scale, raw_threshold, raw_lower_cut, drop_below,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    RANGES: tl.constexpr, ONLINE: tl.constexpr, FLOAT32: tl.constexpr, DROPOUT: tl.constexpr, MARGIN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one step of the walk: key block j."""
    o_k = j * BN + tl.arange(0, BN)
    b_k = load_tile(p_k, j * BN, stride_k, n_keys, D, BD, BN, MASKED)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BD] @ [BD, BN] -> [BM, BN]
    b_one = ones_above(b_s, raw_threshold, o_k, b_first, b_last, MASKED, RANGES)  # keys that count
    b_ones = b_one.to(triangle.dtype)
    b_n = tl.dot(b_ones, triangle)  # [BM, BN] @ [BN, BN] -> [BM, BN]: counted keys from j to the block's end
    b_stays = b_one
    if MARGIN != NO_MARGIN and (MARGIN != INFINITE or MASKED):
        b_stays = ones_above(b_s, raw_lower_cut, o_k, b_first, b_last, MASKED, RANGES)
    if ONLINE:
        b_x = b_s * score_scale + b_slope[:, None] * (b_n + b_count[:, None])
        if MARGIN != INFINITE or MASKED:
            b_x = tl.where(b_stays > 0.0, b_x, float("-inf"))
        b_new = tl.maximum(b_ref, tl.max(b_x, 1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink = power(b_ref - b_safe, FLOAT32)
        b_p = power(b_x - b_safe[:, None], FLOAT32)
        b_total = b_total * b_shrink[:, None]
        b_o = b_o * b_shrink[:, None]
        b_ref = b_new
    else:
        b_x = b_s * score_scale + (b_slope[:, None] * b_n + (b_slope * b_count - b_ref)[:, None])
        if MARGIN == NO_MARGIN and not MASKED and triangle.dtype == tl.bfloat16:
            b_p = (
                power(b_x, FLOAT32).to(tl.bfloat16) * b_ones
            )  # bfloat16 holds every power, and takes two products in one instruction
        else:
            b_p = weights(b_x, b_stays, MASKED, ONLINE, FLOAT32, MARGIN)
    b_v = load_tile(p_v, j * BN, stride_v, n_keys, DV, BDV, BN, MASKED)
    if FLOAT32:
        b_total += tl.sum(b_p, 1)[:, None]
        b_p = b_p * (1.0 / HEADROOM)  # exact; a sum of values near the largest float would overflow
    else:
        b_total = tl.dot(b_p.to(b_v.dtype), tl.full([BN, 16], 1.0, b_v.dtype), b_total)  # [BM, BN] @ [BN, 16]
    b_count += counted_in_block(b_n, b_one, MARGIN)  # the count of the block's first key is the block's
    if DROPOUT:
        b_stays = hash32(b_row[:, None] ^ dropout_columns(SEED, o_k)[None, :]) >= drop_below.to(tl.uint32)
        b_p = tl.where(b_stays, b_p, 0.0)  # scaled up at the end: a half might not hold it
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)  # [BM, BN] @ [BN, BDV] -> [BM, BDV]
    return b_o, b_total, b_ref, b_count


@triton.jit
def _walk(
    b_q, b_o, b_total, b_ref, b_count, b_slope, b_bound, b_geometric, b_margin, b_first, b_last, b_row, triangle, p_k,
    p_v, SEED, j, oldest, steps, end, stride_k, stride_v, n_keys, score_scale, raw_threshold, raw_lower_cut,
    log_tolerance, older_keys, drop_below,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    RANGES: tl.constexpr, ONLINE: tl.constexpr, EARLY: tl.constexpr, FLOAT32: tl.constexpr, DROPOUT: tl.constexpr,
    MARGIN: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk from key block j down to `end`. Where the keys left provably don't count, stop and set `oldest` to j + 1.

    An inner loop over `steps` blocks can be pipelined. After it the bound is checked, and `steps` becomes an estimate
    of how many more blocks are needed, from the rate at which the slowest row keeps keys (taken as half of the keys
    while it has seen few). The estimate only says when the bound is checked next; it never ends a walk.
    """
    while j >= tl.maximum(end, oldest):
        now = tl.minimum(steps, j - tl.maximum(end, oldest) + 1)
        for step in range(now):
            b_o, b_total, b_ref, b_count = _forward_block(
                b_q, b_o, b_total, b_ref, b_count, b_slope, b_first, b_last, b_row, triangle, p_k, p_v, SEED, j - step,
                stride_k, stride_v, n_keys, score_scale, raw_threshold, raw_lower_cut, drop_below,
                D, DV, BD, BDV, BN, MASKED, RANGES, ONLINE, FLOAT32, DROPOUT, MARGIN, PRECISION,
            )  # fmt: skip
        j -= now
        if EARLY:
            b_left = ((j + 1) * BN - b_first).to(tl.float32)  # keys to the left in a row's range, or more
            if PIECE:
                b_left += older_keys
            b_decay = b_slope * (b_count + 1.0 if MARGIN == NO_MARGIN else b_count)
            b_terms = tl.minimum(tl.maximum(b_left, 1.0), b_geometric)
            if MARGIN != NO_MARGIN:
                b_terms += tl.maximum(b_left, 1.0) * b_margin
            b_rest = b_bound + b_decay + log(b_terms, FLOAT32)
            b_rest += (1.0 + tl.abs(b_bound) + tl.abs(b_decay)) * 1e-6  # more than what rounding can hide
            b_excess = b_rest - (b_ref + log(tl.max(b_total, 1), FLOAT32) + log_tolerance)
            m_going = (b_left > 0) & ~(b_excess < 0.0)
            b_walked = (b_last - (j + 1) * BN).to(tl.float32)
            b_excess = tl.minimum(b_excess, -1.5 * log_tolerance)  # else infinite for a row that has kept nothing
            b_keys = b_excess / tl.minimum(b_slope, -1e-30) * (b_walked + 64.0) / (-b_count - 32.0)
            b_keys = tl.where(
                b_keys < MAX_UNCHECKED_BLOCKS * BN, tl.maximum(b_keys, 1.0), MAX_UNCHECKED_BLOCKS * BN
            )  # a NaN walks on
            b_more = tl.where(m_going, b_keys, 0.0)
            more = tl.max(b_more)
            steps = (more * (1.0 / BN)).to(tl.int32) + 1
            if more == 0.0:
                oldest = j + 1
    return b_o, b_total, b_ref, b_count, j, oldest, steps


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["heads_sorted"])
def forward_kernel(
    Q, K, V, FORGET, FIRST, LAST, LONGEST_KEY, SEED, OUT, OUT_ERROR, REF, TOTAL, STOP, COUNTED,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_fb, stride_fh, stride_f, stride_ob, stride_oh, stride_o,
    heads_sorted, n_queries, n_keys, heads, group, score_scale, raw_threshold, raw_lower_cut, threshold, bound,
    log_tolerance, older_keys, drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, RANGES: tl.constexpr, ONLINE: tl.constexpr, NORMS: tl.constexpr, EARLY: tl.constexpr,
    FLOAT32: tl.constexpr, DROPOUT: tl.constexpr, MARGIN: tl.constexpr, KEEP_OUT_ERROR: tl.constexpr,
    REF_SHIFT: tl.constexpr, STEEPEST: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Let a block of queries walk its keys from right to left.

    Leaves per row: OUT; OUT_ERROR, what rounding OUT removed, which backward needs; REF and TOTAL, with weight =
    exp(logit - REF) / TOTAL, or REF alone in half precision; STOP, the oldest key read. ONLINE: the reference is a
    running maximum. With it, and with a margin, distances count one key less, in REF too (softmax doesn't see it).
    PIECE: there are `older_keys` further keys, which another call reads. A walk then stops only where these don't count
    either, and COUNTED is left too, the number of counted keys.
    """
    i_bh, i_m = head_and_block(tl.cdiv(n_queries, BM), heads_sorted)
    start = i_m * BM
    i_b, i_h = (i_bh // heads).to(tl.int64), (i_bh % heads).to(tl.int64)
    p_k = K + i_b * stride_kb + i_h // group * stride_kh
    p_v = V + i_b * stride_vb + i_h // group * stride_vh
    o_m = start + tl.arange(0, BM)
    m_m = o_m < n_queries
    o_row = i_bh.to(tl.int64) * n_queries + o_m
    b_q = load_tile(Q + i_b * stride_qb + i_h * stride_qh, start, stride_q, n_queries, D, BD, BM, True)
    p_forget = FORGET + i_b * stride_fb + i_h * stride_fh + o_m.to(tl.int64) * stride_f
    b_slope = slopes(p_forget, m_m, ONLINE, FLOAT32, STEEPEST)
    b_first, b_last, newest, oldest, whole_from, whole_to = visible_ranges(
        FIRST, LAST, i_b, start, n_queries, n_keys, BM, BN, RANGES
    )

    b_bound = tl.zeros([BM], tl.float32) + bound
    if NORMS:  # ‖q‖ · max ‖k‖, with the largest entry taken out so that squares don't underflow
        b_wide = tl.abs(b_q.to(tl.float32))
        b_largest = tl.max(b_wide, 1)
        b_unit = b_wide / tl.where(b_largest == 0.0, 1.0, b_largest)[:, None]
        b_bound = bound * (b_largest * tl.sqrt(tl.sum(b_unit * b_unit, 1)) * tl.load(LONGEST_KEY + i_bh // group))
    b_geometric = b_slope  # Σ exp(δ t) over t = 0, 1, ...: 1 / (1 - exp δ)
    b_margin = b_bound  # the most that a key inside the margin weighs, relative to the highest score
    if EARLY:
        if MARGIN != NO_MARGIN:
            b_margin = power(tl.minimum(threshold - b_bound, 0.0), FLOAT32)
        b_forget = b_slope if FLOAT32 else b_slope / LOG2_E
        b_geometric = 1.0 / one_minus_exp(b_forget)
        # Rows that see nothing don't keep the block walking.
        b_first = tl.where(m_m & (b_last >= b_first), b_first, LARGE_INDEX)

    b_ref = b_bound - REF_SHIFT  # no logit is higher: the nearest key has n = 1, or 0 if distances count one less
    if MARGIN == NO_MARGIN:
        b_ref = b_bound + b_slope - REF_SHIFT
    if ONLINE:
        b_ref = tl.full([BM], float("-inf"), tl.float32)
    b_row = dropout_rows(SEED, o_row) if DROPOUT else o_m
    triangle = ones_triangle(BN, MARGIN, False).to(tl.bfloat16 if V.dtype.element_ty == tl.bfloat16 else tl.float16)
    b_count = tl.zeros([BM], tl.float32)
    if ONLINE and MARGIN == NO_MARGIN:
        b_count -= 1.0  # so that the nearest kept key's logit is its score, exactly, however steep the slope
    b_total16 = tl.zeros([BM, 16], tl.float32)  # of the weights as rounded as they meet the values, in every column
    b_o = tl.zeros([BM, BDV], tl.float32)
    j, steps = newest, newest * 0 + LARGE_INDEX
    for PHASE in tl.static_range(3 if RANGES else 2):  # where rows end, whole blocks, where rows begin
        end = whole_to + 1 if PHASE == 0 else whole_from if PHASE == 1 else 0
        b_o, b_total16, b_ref, b_count, j, oldest, steps = _walk(
            b_q, b_o, b_total16, b_ref, b_count, b_slope, b_bound, b_geometric, b_margin, b_first, b_last, b_row,
            triangle, p_k, p_v, SEED, j, oldest, steps, end, stride_k, stride_v, n_keys, score_scale, raw_threshold,
            raw_lower_cut, log_tolerance, older_keys, drop_below, D, DV, BD, BDV, BN, PHASE != 1, RANGES, ONLINE, EARLY,
            FLOAT32, DROPOUT, MARGIN, PIECE, PRECISION,
        )  # fmt: skip
    b_total = tl.max(b_total16, 1)
    b_empty = b_total == 0.0
    b_total = tl.where(b_empty, 1.0, b_total)
    b_o = b_o / b_total[:, None]
    if FLOAT32:
        b_o *= HEADROOM
    if DROPOUT:
        b_o *= drop_scale
    store_tile(OUT + i_b * stride_ob + i_h * stride_oh, start, stride_o, n_queries, b_o, DV, BDV, BM)
    if KEEP_OUT_ERROR:
        b_error = b_o - b_o.to(OUT.dtype.element_ty).to(tl.float32)
        store_tile(OUT_ERROR + i_b * stride_ob + i_h * stride_oh, start, stride_o, n_queries, b_error, DV, BDV, BM)
    b_ref = tl.where(b_empty, 1e30, b_ref)
    if FLOAT32:
        tl.store(TOTAL + o_row, b_total, mask=m_m)
    else:
        b_ref += tl.log2(b_total)
    tl.store(REF + o_row, b_ref, mask=m_m)
    if PIECE:
        tl.store(COUNTED + o_row, b_count + 1.0 if ONLINE and MARGIN == NO_MARGIN else b_count, mask=m_m)
    tl.store(STOP + o_row, tl.zeros([BM], tl.int32) + tl.minimum(oldest, newest + 1) * BN, mask=m_m)
