"""The Triton kernels of decoding: few queries, many keys, in pieces. `tra/ops/README.md` has the derivation.

Names and units are explained in `kernel_parts.py`. Here keys are the rows of a product and queries its columns: few
queries then fill 16 columns instead of 64 rows. q·k is the same instruction, summed in the same order, as in the other
kernels, so all keep the same keys, to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tra.ops.triton.kernel_parts import LARGE_INDEX, LOG2_E, NO_MARGIN, log, ones_triangle, power, slopes

SIZES = [
    "stride_s", "n_keys", "kv_heads", "start", "phase_blocks", "min_blocks", "former_pieces", "pieces", "table_pages",
]  # fmt: skip
"""Arguments for whose values (1, multiples of 16) no separate kernel is compiled."""


@triton.jit
def _load_keys(p, start, m_k, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, BN: tl.constexpr):
    """Load rows `start...` as `[BN, PADDED]`; those outside of `m_k` aren't read, and are 0."""
    o_row, o_column = tl.arange(0, BN), tl.arange(0, PADDED)
    p_tile = p + tl.cast(start, tl.int64) * stride + o_row[:, None] * stride + o_column[None, :]
    if PADDED > WIDTH:
        b = tl.load(p_tile, mask=m_k[:, None] & (o_column[None, :] < WIDTH), other=0.0)
    else:
        b = tl.load(p_tile, mask=m_k[:, None], other=0.0)
    return b


@triton.jit
def _decode_block(
    b_q, b_o, b_totals, b_ref, b_counts, b_slope, b_first, b_last, triangle, ones, p_k, p_v, p_mask, p_table, j, oldest,
    newest, stride_k, stride_v, stride_m, stride_kp, stride_vp, table_pages, score_scale, raw_threshold, raw_lower_cut,
    headroom,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    MARGIN: tl.constexpr, FIXED_REFERENCE: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Take one step of the walk: key block j. Keys that no query sees aren't read.

    PAGE_BLOCKS, where it isn't 0: blocks of a page, whose place is looked up in the table of the row.

    Keys lie across warps, so a reduction over them would wait for all warps; a small product doesn't. Each row of
    `b_counts` has the count of newer blocks, less one without a margin. `b_totals` has sums of weights that add up,
    over keys, to a row's.
    """
    o_k = j * BN + tl.arange(0, BN)
    m_k = (o_k >= oldest) & (o_k <= newest)
    if MASKED:
        m_k = m_k & (tl.load(p_mask + o_k.to(tl.int64) * stride_m, mask=m_k, other=0) != 0)
    start = j * BN
    if PAGE_BLOCKS:
        page = tl.load(p_table + j // PAGE_BLOCKS % table_pages).to(tl.int64)
        p_k, p_v, start = p_k + page * stride_kp, p_v + page * stride_vp, j % PAGE_BLOCKS * BN
    b_k = _load_keys(p_k, start, m_k, stride_k, D, BD, BN)
    b_v = _load_keys(p_v, start, m_k, stride_v, DV, BDV, BN)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BN, BD] @ [BD, BM] -> [BN, BM]
    m_seen = m_k[:, None] & (o_k[:, None] >= b_first[None, :]) & (o_k[:, None] <= b_last[None, :])
    m_counted = ~(b_s <= raw_threshold) & m_seen  # a NaN counts and stays, so that it shows
    m_stays = m_counted if MARGIN == NO_MARGIN else ~(b_s <= raw_lower_cut) & m_seen
    b_one = m_counted.to(tl.float16)
    b_n = tl.dot(triangle, b_one, b_counts)  # [BN, BN] @ [BN, BM] -> [BN, BM]: a key's distance, less one
    b_counts = tl.dot(ones, b_one, b_counts)
    b_x = tl.where(m_stays, b_s * score_scale + b_slope[None, :] * b_n, float("-inf"))
    if not FIXED_REFERENCE:
        b_new = tl.maximum(b_ref, tl.max(b_x, 0))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink = power(b_ref - b_safe, FLOAT32)[None, :]
        b_x -= b_safe[None, :]
        b_totals, b_o, b_ref = b_totals * b_shrink, b_o * b_shrink, b_new
    b_p = power(b_x, FLOAT32).to(b_v.dtype)
    b_totals += b_p.to(tl.float32)  # of the weights as rounded as they meet the values
    if FLOAT32:
        b_p = b_p * (1.0 / headroom)  # exact; a sum of values near the largest float would overflow
    b_o = tl.dot(tl.trans(b_v), b_p, b_o, input_precision=PRECISION)  # [BDV, BN] @ [BN, BM] -> [BDV, BM]
    return b_o, b_totals, b_ref, b_counts


@triton.jit
def _keys_to_go(
    b_ref, b_total, b_former, b_count, b_slope, b_geometric, b_first, edge, walked, bound, threshold, log_tolerance,
    BN: tl.constexpr, MARGIN: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Estimate how many more keys to read before the next check; 0 if no key left of `edge` counts, in any row.

    The remaining keys are compared with the piece's own sum or with `b_former`, that of newer pieces, whichever is
    larger. The estimate is that of `forward_kernel._walk`.
    """
    b_left = (edge - b_first).to(tl.float32)
    b_decay = b_slope * (b_count + 1.0 if MARGIN == NO_MARGIN else b_count)
    b_terms = tl.minimum(tl.maximum(b_left, 1.0), b_geometric)
    if MARGIN != NO_MARGIN:
        b_terms += tl.maximum(b_left, 1.0) * power(tl.minimum(threshold - bound, 0.0), FLOAT32)
    b_rest = bound + b_decay + log(b_terms, FLOAT32)
    b_rest += (1.0 + tl.abs(bound) + tl.abs(b_decay)) * 1e-6  # more than what rounding can hide
    b_excess = b_rest - (tl.maximum(b_ref + log(b_total, FLOAT32), b_former) + log_tolerance)
    m_going = (b_left > 0) & ~(b_excess < 0.0)
    b_excess = tl.minimum(b_excess, -1.5 * log_tolerance)  # else infinite for a row that has kept nothing
    b_keys = b_excess / tl.minimum(b_slope, -1e-30) * (walked + 64.0) / (-b_count - 32.0)
    b_keys = tl.where(b_keys < 16.0 * BN, tl.maximum(b_keys, 1.0), 16.0 * BN)  # a NaN walks on
    return tl.max(tl.where(m_going, b_keys, 0.0))


@triton.jit
def _former_pieces(
    PIECE_STATS, o_stats, b_slope, m_m, n_rows, former_pieces, stride_s,
    BM: tl.constexpr, PIECES_AT_ONCE: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Return the logarithm of the weight of the pieces of earlier phases, and whether one of them stopped.

    The weight is relative to a key that has all their keys to its right. Keys counted in between can only lower that
    key's weight, so the comparison is safe.
    """
    o_m = tl.arange(0, BM)
    b_ref = tl.full([BM], float("-inf"), tl.float32)
    b_total, b_count = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    stopped = former_pieces * 0.0
    for chunk in range(tl.cdiv(former_pieces, PIECES_AT_ONCE)):
        o_p = chunk * PIECES_AT_ONCE + tl.arange(0, PIECES_AT_ONCE)
        m_p = (o_p < former_pieces)[:, None] & m_m[None, :]
        p_stats = PIECE_STATS + o_stats + o_p[:, None] * n_rows + o_m[None, :]
        b_r = tl.load(p_stats, mask=m_p, other=float("-inf"))
        b_t = tl.load(p_stats + stride_s, mask=m_p, other=0.0)
        b_c = tl.load(p_stats + 2 * stride_s, mask=m_p, other=0.0)
        stopped = tl.maximum(stopped, tl.max(tl.load(p_stats + 3 * stride_s, mask=m_p, other=0.0)))
        b_right = tl.cumsum(b_c, 0) - b_c + b_count[None, :]
        b_x = tl.where(b_t == 0.0, float("-inf"), b_r + b_slope[None, :] * b_right)
        b_new = tl.maximum(b_ref, tl.max(b_x, 0))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_total = b_total * power(b_ref - b_safe, FLOAT32) + tl.sum(b_t * power(b_x - b_safe[None, :], FLOAT32), 0)
        b_ref = b_new
        b_count += tl.sum(b_c, 0)
    b_shift = b_slope * b_count
    b_former = b_ref + log(b_total, FLOAT32) - b_shift - (1.0 + tl.abs(b_ref) + tl.abs(b_shift)) * 1e-6
    return b_former, stopped


@triton.jit(do_not_specialize=SIZES)
def decode_kernel(
    Q, K, V, FORGET, FIRST, LAST, MASK, TABLE, OUT, PIECE_SUMS, PIECE_STATS,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_fb, stride_fh, stride_f, stride_mb, stride_m, stride_ob, stride_oh, stride_o, stride_s,
    n_queries, n_keys, kv_heads, group, score_scale, raw_threshold, raw_lower_cut, threshold, bound, log_tolerance,
    headroom, start, phase_blocks, min_blocks, former_pieces, pieces, table_pages,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr, MASKED: tl.constexpr, EARLY: tl.constexpr,
    LATER_PHASE: tl.constexpr, ONE_PIECE: tl.constexpr, MARGIN: tl.constexpr, FIXED_REFERENCE: tl.constexpr,
    FLOAT32: tl.constexpr,
    PIECES_AT_ONCE: tl.constexpr, STRIDE_UNIT: tl.constexpr, PRECISION: tl.constexpr, PAGE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Let all queries of a key head walk one piece of its keys, from right to left.

    A phase has `phase_blocks` key blocks, the newest of them `start` blocks from the newest key, in as many pieces as
    there are programs along axis 1, each of `min_blocks` blocks or more. Leaves per row: PIECE_SUMS, the sum of values;
    PIECE_STATS, four planes: reference and sum of the weights, the number of kept keys, and whether all older keys
    provably don't count. LATER_PHASE: there are `former_pieces` pieces of earlier phases to compare with. ONE_PIECE:
    this is the only piece, so it writes the output. FIXED_REFERENCE: a row's slope is its reference. Strides of keys
    and values are in units of STRIDE_UNIT. PAGE_BLOCKS, where it isn't 0: keys and values lie in pages of that many
    blocks, their batch strides are those of pages, and logical page l of a row is at column l % `table_pages` of TABLE.
    FLOAT32: sums of values are divided by `headroom`.
    """
    i_bk, i_piece = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = (i_bk // kv_heads).to(tl.int64), (i_bk % kv_heads).to(tl.int64)
    n_rows = group * n_queries
    o_m = tl.arange(0, BM)
    m_m = o_m < n_rows
    o_h, o_t = i_hk * group + o_m // n_queries, (o_m % n_queries).to(tl.int64)
    if RANGES:
        b_first = tl.load(FIRST + i_b * n_queries + o_t, mask=m_m, other=0)
        b_last = tl.load(LAST + i_b * n_queries + o_t, mask=m_m, other=-1)
    else:
        b_first = o_m * 0
        b_last = o_m % n_queries + (n_keys - n_queries)
    m_sees = m_m & (b_last >= b_first)
    b_first = tl.where(m_sees, b_first, LARGE_INDEX)  # rows that see nothing don't keep the block walking
    b_last = tl.where(m_sees, b_last, -1)
    oldest, newest = tl.min(b_first), tl.max(b_last)
    p_forget = FORGET + i_b * stride_fb + o_h * stride_fh + o_t * stride_f
    b_slope = slopes(p_forget, m_m, False, FLOAT32, 1e30)  # powers of it stay finite

    high = (newest + BN) // BN - 1 - start
    low = tl.maximum(oldest // BN, high - phase_blocks + 1)
    each = tl.maximum(tl.cdiv(tl.maximum(high - low + 1, 0), tl.num_programs(1)), min_blocks)
    j = high - i_piece * each
    low = tl.maximum(low, j - each + 1)

    b_former = tl.full([BM], float("-inf"), tl.float32)
    b_total, b_count = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    b_ref = b_total if FIXED_REFERENCE else b_former  # less the slope, as counts are less one
    # With a margin all references leave out the 1 of distances: several pieces may have it, and must agree.
    b_shift = b_slope if MARGIN == NO_MARGIN else b_slope * 0.0
    b_geometric, top = b_slope, (j + 1) * BN
    steps, stopped = j * 0 + LARGE_INDEX, j * 0.0
    o_stats = i_bk.to(tl.int64) * pieces * n_rows
    if LATER_PHASE:
        b_former, stopped = _former_pieces(
            PIECE_STATS, o_stats, b_slope, m_m, n_rows, former_pieces, stride_s, BM, PIECES_AT_ONCE, FLOAT32
        )
    if EARLY:
        b_forget = b_slope if FLOAT32 else b_slope / LOG2_E  # Σ exp(δ t) over t = 0, 1, ...: by its series near 0
        b_series = -b_forget * (1.0 + b_forget * (0.5 + b_forget * (1.0 / 6.0 + b_forget * (1.0 / 24.0))))
        b_geometric = 1.0 / tl.where(b_forget > -0.05, b_series, 1.0 - tl.exp(b_forget))
        more = _keys_to_go(
            b_ref, b_total, b_former, b_count, b_slope, b_geometric, b_first, top, 0.0, bound, threshold,
            log_tolerance, BN, MARGIN, FLOAT32,
        )  # fmt: skip
        steps = (more * (1.0 / BN)).to(tl.int32) + 1
        if (more == 0.0) | (stopped > 0.0):
            low = j + 1
            stopped = stopped * 0.0 + 1.0

    o_d = tl.arange(0, BD)
    p_q = Q + i_b * stride_qb + (o_h * stride_qh + o_t * stride_q)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & (o_d[None, :] < D), other=0.0)
    if PAGE_BLOCKS:
        p_k, p_v, p_table = K + i_hk * stride_kh * STRIDE_UNIT, V + i_hk * stride_vh * STRIDE_UNIT, TABLE
        p_table += i_b * table_pages
    else:
        p_k = K + (i_b * stride_kb + i_hk * stride_kh) * STRIDE_UNIT
        p_v = V + (i_b * stride_vb + i_hk * stride_vh) * STRIDE_UNIT
        p_table = TABLE
    p_mask = MASK + i_b * stride_mb if MASKED else MASK
    triangle = ones_triangle(BN, MARGIN, True).to(tl.float16)
    ones = tl.full([BN, BN], 1.0, tl.float16)
    FIRST_COUNT: tl.constexpr = -1.0 if MARGIN == NO_MARGIN else 0.0  # so that counts are distances, less one
    b_counts, b_totals = tl.full([BN, BM], FIRST_COUNT, tl.float32), tl.zeros([BN, BM], tl.float32)
    b_o = tl.zeros([BDV, BM], tl.float32)
    walks = j >= low
    while j >= low:
        now = tl.minimum(steps, j - low + 1)
        for step in range(now):
            b_o, b_totals, b_ref, b_counts = _decode_block(
                b_q, b_o, b_totals, b_ref, b_counts, b_slope, b_first, b_last, triangle, ones, p_k, p_v, p_mask,
                p_table, j - step, oldest, newest, stride_k * STRIDE_UNIT, stride_v * STRIDE_UNIT, stride_m,
                stride_kb * STRIDE_UNIT, stride_vb * STRIDE_UNIT, table_pages, score_scale, raw_threshold,
                raw_lower_cut, headroom, D, DV, BD, BDV, BN, MASKED, MARGIN, FIXED_REFERENCE, FLOAT32, PRECISION,
                PAGE_BLOCKS,
            )  # fmt: skip
        j -= now
        b_total, b_count = tl.sum(b_totals, 0), tl.max(b_counts, 0) - FIRST_COUNT
        if EARLY:
            walked = (top - (j + 1) * BN).to(tl.float32)
            more = _keys_to_go(
                b_ref + b_shift, b_total, b_former, b_count, b_slope, b_geometric, b_first, (j + 1) * BN, walked,
                bound, threshold, log_tolerance, BN, MARGIN, FLOAT32,
            )  # fmt: skip
            steps = (more * (1.0 / BN)).to(tl.int32) + 1
            if more == 0.0:
                low = j + 1
                stopped = stopped * 0.0 + 1.0

    o_dv = tl.arange(0, BDV)
    m_o = (o_dv < DV)[:, None] & m_m[None, :]
    if ONE_PIECE:
        b_o = b_o / tl.where(b_total == 0.0, 1.0, b_total)[None, :]
        if FLOAT32:
            b_o *= headroom
        p_o = OUT + i_b * stride_ob + (o_h * stride_oh + o_t * stride_o)[None, :] + o_dv[:, None]
        tl.store(p_o, b_o.to(OUT.dtype.element_ty), mask=m_o)
    else:
        o_row = o_stats + (former_pieces + i_piece) * n_rows + o_m
        tl.store(PIECE_SUMS + (o_row * DV)[None, :] + o_dv[:, None], b_o, mask=m_o & walks)
        tl.store(PIECE_STATS + o_row, b_ref + b_shift, mask=m_m)
        tl.store(PIECE_STATS + stride_s + o_row, b_total, mask=m_m)
        tl.store(PIECE_STATS + 2 * stride_s + o_row, b_count, mask=m_m)
        tl.store(PIECE_STATS + 3 * stride_s + o_row, b_count * 0.0 + stopped, mask=m_m)


@triton.jit(do_not_specialize=["stride_s", "heads", "pieces"])
def merge_kernel(
    FORGET, PIECE_SUMS, PIECE_STATS, OUT, stride_fb, stride_fh, stride_f, stride_ob, stride_oh, stride_o, stride_s,
    n_queries, heads, group, headroom, pieces,
    DV: tl.constexpr, BP: tl.constexpr, BDV: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of one query, for BDV of its columns: a piece's logits move by what newer pieces count.

    Pieces older than one that stopped are left out; a piece that kept nothing isn't read.
    """
    i_bh, i_t = (tl.program_id(0) // n_queries).to(tl.int64), (tl.program_id(0) % n_queries).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    slope = tl.load(FORGET + i_b * stride_fb + i_h * stride_fh + i_t * stride_f)
    if not FLOAT32:
        slope *= LOG2_E
    slope = tl.where(slope < -1e30, -1e30, slope)
    o_p = tl.arange(0, BP)
    m_p = o_p < pieces
    o_row = (i_bh // group * pieces + o_p) * group * n_queries + i_bh % group * n_queries + i_t
    b_ref = tl.load(PIECE_STATS + o_row, mask=m_p, other=float("-inf"))
    b_total = tl.load(PIECE_STATS + stride_s + o_row, mask=m_p, other=0.0)
    b_count = tl.load(PIECE_STATS + 2 * stride_s + o_row, mask=m_p, other=0.0)
    b_stopped = tl.load(PIECE_STATS + 3 * stride_s + o_row, mask=m_p, other=0.0)
    b_total = tl.where(tl.cumsum(b_stopped, 0) - b_stopped > 0.0, 0.0, b_total)
    b_right = tl.cumsum(b_count, 0) - b_count
    b_x = tl.where(b_total == 0.0, float("-inf"), b_ref + slope * b_right)
    highest = tl.max(b_x)
    b_w = power(b_x - tl.where(highest == float("-inf"), 0.0, highest), FLOAT32)
    total = tl.sum(b_total * b_w)
    o_dv = tl.program_id(1) * BDV + tl.arange(0, BDV)
    m_o = (b_w != 0.0)[:, None] & (o_dv < DV)[None, :]
    b_o = tl.load(PIECE_SUMS + (o_row * DV)[:, None] + o_dv[None, :], mask=m_o, other=0.0)
    b_o = tl.sum(b_o * b_w[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    if FLOAT32:
        b_o *= headroom
    p_o = OUT + i_b * stride_ob + i_h * stride_oh + i_t * stride_o + o_dv
    tl.store(p_o, b_o.to(OUT.dtype.element_ty), mask=o_dv < DV)
