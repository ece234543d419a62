"""The gradients as two Triton kernels. Names and units are explained in `kernel_parts.py`."""

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
    gradient_before_norm,
    hash32,
    head_and_block,
    load_pairs,
    load_rows,
    load_tile,
    one_minus_exp,
    ones_above,
    ones_triangle,
    power,
    slopes,
    store_tile,
    visible_ranges,
    weights,
)

LISTED_AT_ONCE = tl.constexpr(256)
"""Row blocks that are compared with a key block at once."""


@triton.jit
def _query_gradient_block(
    b_q, b_do, b_dq, b_dforget, b_surplus, b_distance, b_mean, b_count, b_slope, b_ref, b_scale, b_inner, b_first,
    b_last, b_row, m_m, triangle, p_k, p_v, p_offsets, SEED, j, stride_k, stride_v, stride_c, n_keys, score_scale,
    raw_threshold, raw_lower_cut, drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
    KEY_RATIO: tl.constexpr, MASKED: tl.constexpr, RANGES: tl.constexpr, ONLINE: tl.constexpr,
    FLOAT32: tl.constexpr, DROPOUT: tl.constexpr, MARGIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one step of the walk for the gradients of queries and gates: key block j."""
    o_k = j * BN + tl.arange(0, BN)
    b_k = load_tile(p_k, j * BN, stride_k, n_keys, D, BD, BN, MASKED)
    b_v = load_tile(p_v, j * BN, stride_v, n_keys, DV, BDV, BN, MASKED)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BD] @ [BD, BN] -> [BM, BN]
    b_one = ones_above(b_s, raw_threshold, o_k, b_first, b_last, MASKED, RANGES)
    b_stays = b_one
    if MARGIN != NO_MARGIN and (MARGIN != INFINITE or MASKED):
        b_stays = ones_above(b_s, raw_lower_cut, o_k, b_first, b_last, MASKED, RANGES)
    b_offset = b_count if ONLINE else b_slope * b_count - b_ref
    m_first = (j + 1) % KEY_RATIO == 0  # the newest of the blocks that are one in the other kernel
    tl.store(p_offsets + tl.cast(j // KEY_RATIO, tl.int64) * stride_c, b_offset, mask=m_m & m_first)
    b_n = tl.dot(b_one.to(tl.float16), triangle)  # [BM, BN] @ [BN, BN] -> [BM, BN]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)  # [BM, BDV] @ [BDV, BN] -> [BM, BN]
    if ONLINE:
        b_n += b_count[:, None]
        b_x = b_s * score_scale + (b_slope[:, None] * b_n - b_ref[:, None])
    else:
        b_x = b_s * score_scale + (b_slope[:, None] * b_n + b_offset[:, None])
    b_p = weights(b_x, b_stays, MASKED, ONLINE, FLOAT32, MARGIN)
    if FLOAT32:
        b_p *= b_scale[:, None]
    if DROPOUT:
        b_stays = hash32(b_row[:, None] ^ dropout_columns(SEED, o_k)[None, :]) >= drop_below.to(tl.uint32)
        b_dp = tl.where(b_stays, b_dp * drop_scale, 0.0)
    b_ds = b_p * (b_dp - b_inner[:, None])
    if not ONLINE:
        b_n += b_count[:, None]
    b_dforget += tl.sum(b_ds * b_n, 1)
    if FLOAT32:
        b_surplus += tl.sum(b_ds, 1)
        b_distance += tl.sum(b_p * b_n, 1)
        b_mean = tl.dot(b_p, b_k, b_mean, input_precision=PRECISION)  # [BM, BN] @ [BN, BD] -> [BM, BD]
    b_count = counted_in_block(b_n, b_one, MARGIN)
    b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)  # [BM, BN] @ [BN, BD] -> [BM, BD]
    return b_dq, b_dforget, b_surplus, b_distance, b_mean, b_count


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["heads_sorted"])
def query_gradient_kernel(
    Q, K, V, FORGET, FIRST, LAST, SEED, OUT, OUT_ERROR, DOUT, REF, TOTAL, STOP, COUNTED_RIGHT, NORM_FACTOR, DQ, DFORGET,
    SLOPE_INNER, OFFSETS, WALK_ENDS,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_fb, stride_fh, stride_f, stride_ob, stride_oh, stride_o, stride_gb, stride_gh, stride_g,
    stride_dqb, stride_dqh, stride_dq, stride_dfb, stride_dfh, stride_df,
    heads_sorted, chunk, n_rows, n_blocks, n_queries, n_keys, heads, group, scale, score_scale, raw_threshold,
    raw_lower_cut, drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, KEY_RATIO: tl.constexpr, RANGES: tl.constexpr, ONLINE: tl.constexpr, FLOAT32: tl.constexpr,
    DROPOUT: tl.constexpr, MARGIN: tl.constexpr, BEFORE_NORM: tl.constexpr, STEEPEST: tl.constexpr,
    PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Repeat the forward's walk for the gradients of queries and gates, over rows `chunk...` of `n_rows`.

    Leaves for `key_gradient_kernel`: SLOPE_INNER `[B H, Tq, 2]`, a row's slope and Σ P dP; OFFSETS `[B H, n_blocks,
    n_rows]`, slope · (keys counted right of a key block) - REF, or their number if ONLINE (less one without a margin,
    as in the forward); WALK_ENDS `[B H, row blocks, 2]`, the oldest and newest key block read. The key blocks of that
    kernel are KEY_RATIO times as long. BEFORE_NORM: gradients are those of queries before their norm, which multiplied
    rows by NORM_FACTOR, and of gates before log σ. PIECE: rows have COUNTED_RIGHT counted keys right of these keys, and
    OUT, REF and TOTAL are those of whole rows.
    """
    blocks = n_rows // BM
    i_bh, i_m = head_and_block(blocks, heads_sorted)
    start = chunk + i_m * BM
    i_b, i_h = (i_bh // heads).to(tl.int64), (i_bh % heads).to(tl.int64)
    p_k = K + i_b * stride_kb + i_h // group * stride_kh
    p_v = V + i_b * stride_vb + i_h // group * stride_vh
    o_m = start + tl.arange(0, BM)
    m_m = o_m < n_queries
    o_row = i_bh.to(tl.int64) * n_queries + o_m
    b_q = load_tile(Q + i_b * stride_qb + i_h * stride_qh, start, stride_q, n_queries, D, BD, BM, True)
    b_do = load_tile(DOUT + i_b * stride_gb + i_h * stride_gh, start, stride_g, n_queries, DV, BDV, BM, True)
    b_out = load_tile(OUT + i_b * stride_ob + i_h * stride_oh, start, stride_o, n_queries, DV, BDV, BM, True)
    if FLOAT32:
        b_inner = tl.sum(b_do.to(tl.float64) * b_out.to(tl.float64), 1).to(tl.float32)
    else:
        p_error = OUT_ERROR + i_b * stride_ob + i_h * stride_oh
        b_error = load_tile(p_error, start, stride_o, n_queries, DV, BDV, BM, True)
        b_inner = tl.sum(b_do.to(tl.float32) * (b_out.to(tl.float32) + b_error.to(tl.float32)), 1)
    p_forget = FORGET + i_b * stride_fb + i_h * stride_fh + o_m.to(tl.int64) * stride_f
    b_slope = slopes(p_forget, m_m, ONLINE, FLOAT32, STEEPEST)
    tl.store(SLOPE_INNER + o_row * 2, b_slope, mask=m_m)
    b_ref = tl.load(REF + o_row, mask=m_m, other=0.0)
    b_scale = 1.0 / tl.load(TOTAL + o_row, mask=m_m, other=1.0) if FLOAT32 else b_ref
    b_first, b_last, newest, oldest, whole_from, whole_to = visible_ranges(
        FIRST, LAST, i_b, start, n_queries, n_keys, BM, BN, RANGES
    )
    oldest = tl.min(tl.load(STOP + o_row, mask=m_m, other=LARGE_INDEX)) // BN
    p_walk_ends = WALK_ENDS + (tl.cast(i_bh, tl.int64) * blocks + i_m) * 2
    tl.store(p_walk_ends, oldest // KEY_RATIO)
    tl.store(p_walk_ends + 1, (newest + KEY_RATIO) // KEY_RATIO - 1)  # -1 where nothing is seen

    if PIECE:
        b_right = tl.load(COUNTED_RIGHT + o_row, mask=m_m, other=0.0)
    p_offsets = OFFSETS + tl.cast(i_bh, tl.int64) * n_blocks * n_rows + i_m * BM + tl.arange(0, BM)
    if KEY_RATIO > 1:  # the newest block may begin inside one of the other kernel's
        b_first_offset = -b_ref
        if ONLINE:
            b_first_offset = b_ref * 0.0 - (1.0 if MARGIN == NO_MARGIN else 0.0)
        if PIECE:
            b_first_offset += b_right if ONLINE else b_slope * b_right
        tl.store(p_offsets + tl.cast(newest // KEY_RATIO, tl.int64) * n_rows, b_first_offset, mask=m_m & (newest >= 0))
    b_row = dropout_rows(SEED, o_row) if DROPOUT else o_m
    triangle = ones_triangle(BN, MARGIN, False).to(tl.float16)
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_dforget, b_count = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    if ONLINE and MARGIN == NO_MARGIN:
        b_count -= 1.0  # as in the forward; Σ dS is 0, so Σ dS n doesn't change
    if PIECE:
        b_count += b_right
    b_surplus, b_distance = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    b_mean = tl.zeros([BM, BD], tl.float32) if FLOAT32 else b_inner
    for PHASE in tl.static_range(3 if RANGES else 2):
        end = whole_to + 1 if PHASE == 0 else whole_from if PHASE == 1 else 0
        end = tl.maximum(end, oldest)
        for step in range(newest + 1 - end):
            b_dq, b_dforget, b_surplus, b_distance, b_mean, b_count = _query_gradient_block(
                b_q, b_do, b_dq, b_dforget, b_surplus, b_distance, b_mean, b_count, b_slope, b_ref, b_scale, b_inner,
                b_first, b_last, b_row, m_m, triangle, p_k, p_v, p_offsets, SEED, newest - step, stride_k, stride_v,
                n_rows, n_keys, score_scale, raw_threshold, raw_lower_cut, drop_below, drop_scale,
                D, DV, BD, BDV, BN, KEY_RATIO, PHASE != 1, RANGES, ONLINE, FLOAT32, DROPOUT, MARGIN, PRECISION,
            )  # fmt: skip
        newest = tl.minimum(newest, end - 1)
    if FLOAT32 and not PIECE:  # over a piece Σ dS may differ from 0
        # Σ dS should be 0. If Σ P dP is off by e, then Σ dS is -e, Σ dS n is off by -e · Σ P n, and Σ dS k likewise.
        b_dforget -= b_surplus * b_distance
        b_dq -= b_surplus[:, None] * b_mean
        b_inner += b_surplus
    tl.store(SLOPE_INNER + o_row * 2 + 1, b_inner, mask=m_m)
    p_dq = DQ + i_b * stride_dqb + i_h * stride_dqh
    b_dq *= scale
    if BEFORE_NORM:  # queries are loaded again: kept, they would cost the loop registers
        b_q = load_tile(Q + i_b * stride_qb + i_h * stride_qh, start, stride_q, n_queries, D, BD, BM, True)
        b_dq = gradient_before_norm(b_dq, b_q, NORM_FACTOR + o_row, m_m, D)
    store_tile(p_dq, start, stride_dq, n_queries, b_dq, D, BD, BM)
    if BEFORE_NORM:
        b_dforget *= one_minus_exp(b_slope if FLOAT32 else b_slope / LOG2_E)
    p_dforget = DFORGET + i_b * stride_dfb + i_h * stride_dfh + o_m.to(tl.int64) * stride_df
    tl.store(p_dforget, b_dforget, mask=m_m)


@triton.jit
def _key_gradient_block(
    b_k, b_v, b_dk, b_dv, o_k, b_column, triangle, p_q, p_do, FIRST, LAST, SEED, p_ref, p_total, p_slope_inner,
    p_offsets, i_b, i_bh, start, chunk, stride_q, stride_g, n_queries, n_keys, score_scale, raw_threshold,
    raw_lower_cut, drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, RANGES: tl.constexpr, ONLINE: tl.constexpr, FLOAT32: tl.constexpr, DROPOUT: tl.constexpr,
    MARGIN: tl.constexpr, THREADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what a block of queries contributes to a block of keys. Transposed: keys are rows here."""
    o_m = start + tl.arange(0, BM)
    b_q = load_tile(p_q, start, stride_q, n_queries, D, BD, BM, not EVEN)
    b_do = load_tile(p_do, start, stride_g, n_queries, DV, BDV, BM, not EVEN)
    b_slope, b_inner = load_pairs(p_slope_inner, start, n_queries, BM, EVEN, THREADS)
    b_offset = load_rows(p_offsets, start, n_queries, BM, 0.0, EVEN, THREADS)
    if FLOAT32:
        b_scale = 1.0 / load_rows(p_total, start, n_queries, BM, 1.0, EVEN, THREADS)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BN, BD] @ [BD, BM] -> [BN, BM]
    b_one = tl.where(b_s <= raw_threshold, 0.0, 1.0)
    b_stays = b_one if MARGIN == NO_MARGIN else tl.where(b_s <= raw_lower_cut, 0.0, 1.0)
    if MASKED:
        if RANGES:
            b_first = load_rows(FIRST + i_b * n_queries, start, n_queries, BM, LARGE_INDEX, EVEN, THREADS)
            b_last = load_rows(LAST + i_b * n_queries, start, n_queries, BM, -1, EVEN, THREADS)
            b_one = tl.where(o_k[:, None] >= b_first[None, :], b_one, 0.0)
            b_stays = tl.where(o_k[:, None] >= b_first[None, :], b_stays, 0.0)
        else:
            b_last = o_m + (n_keys - n_queries)
        b_one = tl.where(o_k[:, None] <= b_last[None, :], b_one, 0.0)
        b_stays = tl.where(o_k[:, None] <= b_last[None, :], b_stays, 0.0)
    b_ones = b_one.to(triangle.dtype)
    b_n = tl.dot(triangle, b_ones)  # [BN, BN] @ [BN, BM] -> [BN, BM]
    if ONLINE:
        b_ref = load_rows(p_ref, start, n_queries, BM, 0.0, EVEN, THREADS)
        b_x = b_s * score_scale + (b_slope[None, :] * (b_n + b_offset[None, :]) - b_ref[None, :])
    else:
        b_x = b_s * score_scale + (b_slope[None, :] * b_n + b_offset[None, :])
    if MARGIN == NO_MARGIN and triangle.dtype == tl.bfloat16 and not MASKED and not ONLINE:
        b_p = power(b_x, FLOAT32).to(tl.bfloat16) * b_ones
    else:
        b_p = weights(b_x, b_stays, MASKED, ONLINE, FLOAT32, MARGIN)
    if FLOAT32:
        b_p *= b_scale[None, :]
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)  # [BN, BDV] @ [BDV, BM] -> [BN, BM]
    b_used = b_p
    if DROPOUT:
        b_stays = hash32(b_column[:, None] ^ dropout_rows(SEED, i_bh * n_queries + o_m)[None, :]) >= drop_below.to(
            tl.uint32
        )
        b_dp = tl.where(b_stays, b_dp * drop_scale, 0.0)
        b_used = tl.where(b_stays, b_p * drop_scale, 0.0)
    b_dv = tl.dot(b_used.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)  # [BN, BM] @ [BM, BDV] -> [BN, BDV]
    b_ds = b_p * (b_dp - b_inner[None, :]).to(b_p.dtype)
    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)  # [BN, BM] @ [BM, BD] -> [BN, BD]
    return b_dk, b_dv


@triton.jit
def _walks_that_read(p_walk_ends, j, o_i, blocks):
    """Return 1 for the row blocks `o_i` whose walk read key block j, else 0."""
    b_oldest = tl.load(p_walk_ends + 2 * o_i, mask=o_i < blocks, other=LARGE_INDEX)
    b_newest = tl.load(p_walk_ends + 2 * o_i + 1, mask=o_i < blocks, other=-1)
    return ((b_oldest <= j) & (j <= b_newest)).to(tl.int32)


@triton.jit
def _is_read(WALK_ENDS, i_bh, group, j, blocks):
    """Return whether a walk of `group` heads, from i_bh on, read key block j."""
    readers = j * 0
    for i_g in range(group):
        for part in range(tl.cdiv(blocks, LISTED_AT_ONCE)):
            o_i = part * LISTED_AT_ONCE + tl.arange(0, LISTED_AT_ONCE)
            readers += tl.sum(_walks_that_read(WALK_ENDS + (i_bh + i_g) * blocks * 2, j, o_i, blocks))
    return readers > 0


@triton.jit
def _list_row_blocks(p_walk_ends, p_row_blocks, j, first, blocks, whole_from, ROW_RATIO: tl.constexpr):
    """List the row blocks, from `first` on, whose walk read key block j.

    Returns their number, and how many of them begin before `whole_from`.
    """
    n_listed, n_partial = j * 0, j * 0
    for part in range(first // LISTED_AT_ONCE, tl.cdiv(blocks, LISTED_AT_ONCE)):
        o_i = part * LISTED_AT_ONCE + tl.arange(0, LISTED_AT_ONCE)
        b_visits = _walks_that_read(p_walk_ends, j, o_i, blocks)
        here = tl.sum(b_visits)
        if here > 0:
            tl.store(p_row_blocks + n_listed + tl.cumsum(b_visits, 0) - 1, o_i, mask=b_visits > 0)
            n_partial += tl.sum(tl.where(o_i * ROW_RATIO < whole_from, b_visits, 0))
            n_listed += here
    tl.debug_barrier()  # a thread reads what another one wrote
    return n_listed, n_partial


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["heads_sorted"])
def key_gradient_kernel(
    Q, K, V, FIRST, LAST, SEED, DOUT, REF, TOTAL, NORM_FACTOR, DK, DV_OUT, SLOPE_INNER, OFFSETS, WALK_ENDS, ROW_BLOCKS,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_gb, stride_gh, stride_g,
    stride_dkb, stride_dkh, stride_dk, stride_dvb, stride_dvh, stride_dv,
    seen_blocks, heads_sorted, chunk, n_rows, n_blocks, n_queries, n_keys, heads, group, scale, score_scale,
    raw_threshold, raw_lower_cut, drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ROW_RATIO: tl.constexpr, EVEN: tl.constexpr, RANGES: tl.constexpr, SKIP: tl.constexpr,
    ACCUMULATE: tl.constexpr, ONLINE: tl.constexpr, FLOAT32: tl.constexpr, DROPOUT: tl.constexpr, MARGIN: tl.constexpr,
    BEFORE_NORM: tl.constexpr, THREADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of a block of keys over the row blocks of a chunk whose walk read it, in their order.

    SKIP: some walks stopped early or started late. The row blocks are then listed first, in ROW_BLOCKS `[B H, n_blocks,
    row blocks]`, because a loop with a condition in it can't load ahead. The row blocks of `query_gradient_kernel` are
    ROW_RATIO times as long. EVEN: no row block reaches beyond the queries. ACCUMULATE: add to the sums of earlier
    chunks. BEFORE_NORM: gradients are those of keys before their norm, which multiplied rows by NORM_FACTOR.
    """
    i_bk, i_n = head_and_block(seen_blocks, heads_sorted)
    j = seen_blocks - 1 - i_n  # oldest keys first: most queries see them
    kv_heads = heads // group
    i_b, i_hk = (i_bk // kv_heads).to(tl.int64), (i_bk % kv_heads).to(tl.int64)
    o_n = tl.arange(0, BN)
    o_k = j * BN + o_n
    blocks = n_rows // BM
    n_loaded, blocks_to_list = n_keys, blocks // ROW_RATIO
    if SKIP and ACCUMULATE:  # with many chunks, few walks read these keys; without any, nothing is loaded
        is_read = _is_read(WALK_ENDS, i_b * heads + i_hk * group, group, j, blocks_to_list)
        n_loaded, blocks_to_list = tl.where(is_read, n_keys, 0), tl.where(is_read, blocks_to_list, 0)
    b_k = load_tile(K + i_b * stride_kb + i_hk * stride_kh, j * BN, stride_k, n_loaded, D, BD, BN, True)
    b_v = load_tile(V + i_b * stride_vb + i_hk * stride_vh, j * BN, stride_v, n_loaded, DV, BDV, BN, True)
    triangle = ones_triangle(BN, MARGIN, True).to(tl.bfloat16 if V.dtype.element_ty == tl.bfloat16 else tl.float16)
    b_column = dropout_columns(SEED, o_k) if DROPOUT else o_k
    b_dk, b_dv = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)

    touched = 0
    for i_g in range(group):
        i_h = i_hk * group + i_g
        i_bh = i_b * heads + i_h
        p_q = Q + i_b * stride_qb + i_h * stride_qh
        p_do = DOUT + i_b * stride_gb + i_h * stride_gh
        p_ref, p_total = REF + i_bh * n_queries, TOTAL + i_bh * n_queries
        p_slope_inner = SLOPE_INNER + i_bh * n_queries * 2
        p_offsets = OFFSETS + (i_bh * n_blocks + j) * n_rows - chunk
        # Row blocks from first_block on see a key of this block; from whole_from on every row sees all of them.
        first_block = tl.maximum(j * BN - (n_keys - n_queries) - chunk, 0) // BM
        whole_from = (tl.maximum(j * BN + BN - 1 - (n_keys - n_queries) - chunk, 0) + BM - 1) // BM
        if RANGES:
            first_block, whole_from = first_block * 0, whole_from * 0 + LARGE_INDEX
        end_block = blocks
        p_row_blocks = ROW_BLOCKS + (i_bh * n_blocks + j) * (blocks // ROW_RATIO)
        if SKIP:
            p_walk_ends = WALK_ENDS + i_bh * (blocks // ROW_RATIO) * 2
            end_block, whole_from = _list_row_blocks(
                p_walk_ends, p_row_blocks, j, first_block // ROW_RATIO, blocks_to_list, whole_from, ROW_RATIO
            )
            first_block, whole_from, end_block = first_block * 0, whole_from * ROW_RATIO, end_block * ROW_RATIO
        whole_from = tl.minimum(tl.maximum(whole_from, first_block), end_block)
        touched = tl.maximum(touched, end_block - first_block)
        for PHASE in tl.static_range(2):
            begin, end = first_block if PHASE == 0 else whole_from, whole_from if PHASE == 0 else end_block
            if SKIP:
                i_next = tl.load(p_row_blocks + begin // ROW_RATIO, mask=begin < end, other=0)
            for index in range(begin, end):
                i_m = index
                if SKIP:  # load the list one ahead, or what it points to would be loaded a step late
                    i_m = i_next * ROW_RATIO + index % ROW_RATIO
                    i_next = tl.load(p_row_blocks + tl.minimum(index + 1, end - 1) // ROW_RATIO)
                b_dk, b_dv = _key_gradient_block(
                    b_k, b_v, b_dk, b_dv, o_k, b_column, triangle, p_q, p_do, FIRST, LAST, SEED, p_ref, p_total,
                    p_slope_inner, p_offsets, i_b, i_bh, chunk + i_m * BM, chunk, stride_q, stride_g, n_queries, n_keys,
                    score_scale, raw_threshold, raw_lower_cut, drop_below, drop_scale,
                    D, DV, BD, BDV, BM, PHASE == 0, EVEN, RANGES, ONLINE, FLOAT32, DROPOUT, MARGIN, THREADS, PRECISION,
                )  # fmt: skip
    b_dk *= scale
    p_dk = DK + i_b * stride_dkb + i_hk * stride_dkh
    p_dv = DV_OUT + i_b * stride_dvb + i_hk * stride_dvh
    if ACCUMULATE:
        if touched > 0:
            b_dk += load_tile(p_dk, j * BN, stride_dk, n_keys, D, BD, BN, True)
            b_dv += load_tile(p_dv, j * BN, stride_dv, n_keys, DV, BDV, BN, True)
            store_tile(p_dk, j * BN, stride_dk, n_keys, b_dk, D, BD, BN)
            store_tile(p_dv, j * BN, stride_dv, n_keys, b_dv, DV, BDV, BN)
    else:
        store_tile(p_dv, j * BN, stride_dv, n_keys, b_dv, DV, BDV, BN)
        if BEFORE_NORM:  # loaded again, as the queries are, and after a store, or the compiler would keep them
            b_k = load_tile(K + i_b * stride_kb + i_hk * stride_kh, j * BN, stride_k, n_keys, D, BD, BN, True)
            b_dk = gradient_before_norm(b_dk, b_k, NORM_FACTOR + i_bk.to(tl.int64) * n_keys + o_k, o_k < n_keys, D)
        store_tile(p_dk, j * BN, stride_dk, n_keys, b_dk, D, BD, BN)
