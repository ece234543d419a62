"""The Triton kernels of decoding: few queries, many keys, in pieces; `tra/ops/README.md` has the derivation.

Names and units are those of `_kernel_parts.py`. Here keys are the rows of a product and queries its columns: few
queries fill 16 columns where they would have to fill 64 rows, and q·k is still the instruction, summed in the order, of
the other kernels, so that all keep the same keys, to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tra.ops.triton.kernel_parts import FAR, LOG2_E, log, power, slopes

SIZES = ["stride_s", "n_keys", "kv_heads", "start", "span", "least", "before", "pieces"]
"""Arguments whose values (1, multiples of 16) aren't worth a kernel of their own."""


@triton.jit
def _load_keys(p, start, m_k, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, BN: tl.constexpr):
    """Rows `start...` as `[BN, PADDED]`; those outside of `m_k` aren't read, and are 0."""
    o_row, o_column = tl.arange(0, BN), tl.arange(0, PADDED)
    p_tile = p + tl.cast(start, tl.int64) * stride + o_row[:, None] * stride + o_column[None, :]
    if PADDED > WIDTH:
        b = tl.load(p_tile, mask=m_k[:, None] & (o_column[None, :] < WIDTH), other=0.0)
    else:
        b = tl.load(p_tile, mask=m_k[:, None], other=0.0)
    return b


@triton.jit
def _decode_block(
    b_q, b_o, b_totals, b_ref, b_counts, b_slope, b_first, b_last, triangle, ones, p_k, p_v, p_mask, j, oldest, newest,
    stride_k, stride_v, stride_m, score_scale, cut,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    FIXED: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the walk: key block j. Nothing is read of keys that no query sees.

    Keys lie across warps, so a sum over them waits for all warps, and a small product doesn't. `b_counts` has the count
    of newer blocks, less one, in each of its rows; `b_totals` has sums of weights that add up to a row's over keys.
    """
    o_k = j * BN + tl.arange(0, BN)
    m_k = (o_k >= oldest) & (o_k <= newest)
    if MASKED:
        m_k = m_k & (tl.load(p_mask + o_k.to(tl.int64) * stride_m, mask=m_k, other=0) != 0)
    b_k = _load_keys(p_k, j * BN, m_k, stride_k, D, BD, BN)
    b_v = _load_keys(p_v, j * BN, m_k, stride_v, DV, BDV, BN)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BN, BD] @ [BD, BM] -> [BN, BM]
    m_seen = m_k[:, None] & (o_k[:, None] >= b_first[None, :]) & (o_k[:, None] <= b_last[None, :])
    m_kept = ~(b_s <= cut) & m_seen  # a NaN is kept, so that it shows
    b_one = m_kept.to(tl.float16)
    b_n = tl.dot(triangle, b_one, b_counts)  # [BN, BN] @ [BN, BM] -> [BN, BM]: kept keys from j on, less one
    b_counts = tl.dot(ones, b_one, b_counts)
    b_x = tl.where(m_kept, b_s * score_scale + b_slope[None, :] * b_n, float("-inf"))
    if not FIXED:
        b_new = tl.maximum(b_ref, tl.max(b_x, 0))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink = power(b_ref - b_safe, EXACT)[None, :]
        b_x -= b_safe[None, :]
        b_totals, b_o, b_ref = b_totals * b_shrink, b_o * b_shrink, b_new
    b_p = power(b_x, EXACT).to(b_v.dtype)
    b_totals += b_p.to(tl.float32)  # of the weights as rounded as they meet the values
    b_o = tl.dot(tl.trans(b_v), b_p, b_o, input_precision=PRECISION)  # [BDV, BN] @ [BN, BM] -> [BDV, BM]
    return b_o, b_totals, b_ref, b_counts


@triton.jit
def _keys_to_go(
    b_ref, b_total, b_known, b_count, b_slope, b_geometric, b_first, edge, walked, bound, log_tolerance,
    BN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """For how many more keys it isn't worth asking again; 0 if all left of `edge` provably doesn't count, for all rows.

    It is weighed against the piece's own sum, or `b_known`, that of newer pieces, whichever is larger. The estimate is
    `_forward_kernel._walk`'s: by the rate at which the slowest row has kept keys.
    """
    b_left = (edge - b_first).to(tl.float32)
    b_decay = b_slope * (b_count + 1.0)
    b_rest = bound + b_decay + log(tl.minimum(tl.maximum(b_left, 1.0), b_geometric), EXACT)
    b_rest += (1.0 + tl.abs(bound) + tl.abs(b_decay)) * 1e-6  # more than what rounding can hide
    b_excess = b_rest - (tl.maximum(b_ref + log(b_total, EXACT), b_known) + log_tolerance)
    m_going = (b_left > 0) & ~(b_excess < 0.0)
    b_excess = tl.minimum(b_excess, -1.5 * log_tolerance)  # a row that has kept nothing yet
    b_keys = b_excess / tl.minimum(b_slope, -1e-30) * (walked + 64.0) / (-b_count - 32.0)
    b_keys = tl.where(b_keys < 16.0 * BN, tl.maximum(b_keys, 1.0), 16.0 * BN)  # a NaN walks on
    return tl.max(tl.where(m_going, b_keys, 0.0))


@triton.jit
def _known(
    STATS, o_stats, b_slope, m_m, n_rows, before, stride_s, BM: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr
):
    """What the `before` pieces of former phases make of what follows them: its least possible rival, and a stop.

    The logarithm of their sum, as seen by a key with their count to its right: whatever is counted between only makes
    the key weigh less.
    """
    o_m = tl.arange(0, BM)
    b_ref = tl.full([BM], float("-inf"), tl.float32)
    b_total, b_count = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    stopped = before * 0.0
    for chunk in range(tl.cdiv(before, CHUNK)):
        o_p = chunk * CHUNK + tl.arange(0, CHUNK)
        m_p = (o_p < before)[:, None] & m_m[None, :]
        p_stats = STATS + o_stats + o_p[:, None] * n_rows + o_m[None, :]
        b_r = tl.load(p_stats, mask=m_p, other=float("-inf"))
        b_t = tl.load(p_stats + stride_s, mask=m_p, other=0.0)
        b_c = tl.load(p_stats + 2 * stride_s, mask=m_p, other=0.0)
        stopped = tl.maximum(stopped, tl.max(tl.load(p_stats + 3 * stride_s, mask=m_p, other=0.0)))
        b_right = tl.cumsum(b_c, 0) - b_c + b_count[None, :]
        b_x = tl.where(b_t == 0.0, float("-inf"), b_r + b_slope[None, :] * b_right)
        b_new = tl.maximum(b_ref, tl.max(b_x, 0))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_total = b_total * power(b_ref - b_safe, EXACT) + tl.sum(b_t * power(b_x - b_safe[None, :], EXACT), 0)
        b_ref = b_new
        b_count += tl.sum(b_c, 0)
    b_shift = b_slope * b_count
    b_known = b_ref + log(b_total, EXACT) - b_shift - (1.0 + tl.abs(b_ref) + tl.abs(b_shift)) * 1e-6
    return b_known, stopped


@triton.jit(do_not_specialize=SIZES)
def decode_kernel(
    Q, K, V, FORGET, FIRST, LAST, MASK, OUT, PARTS, STATS,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_fb, stride_fh, stride_f, stride_mb, stride_m, stride_ob, stride_oh, stride_o, stride_s,
    n_queries, n_keys, kv_heads, group, score_scale, cut, bound, log_tolerance, start, span, least, before, pieces,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RANGES: tl.constexpr, MASKED: tl.constexpr, EARLY: tl.constexpr, LATER: tl.constexpr, ALONE: tl.constexpr,
    FIXED: tl.constexpr, EXACT: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All queries of a key head walk one piece of its keys, from right to left.

    A phase has `span` key blocks, the newest of them `start` blocks from the newest key, in as many pieces as programs
    along axis 1, each of `least` blocks or more. Leaves, per row: PARTS, the sum of values; STATS, four planes: the
    reference and the sum of the weights, the keys kept, and whether all that is older provably doesn't count. LATER:
    there are `before` pieces of former phases to ask; ALONE: this is the only piece, so what it leaves is the output.
    FIXED: the reference is a row's slope, and doesn't run. Strides of keys and values are in UNITs.
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
    b_first = tl.where(m_sees, b_first, FAR)  # rows that see nothing hold nobody up
    b_last = tl.where(m_sees, b_last, -1)
    oldest, newest = tl.min(b_first), tl.max(b_last)
    p_forget = FORGET + i_b * stride_fb + o_h * stride_fh + o_t * stride_f
    b_slope = slopes(p_forget, m_m, False, EXACT, 1e30)  # powers of it stay finite

    high = (newest + BN) // BN - 1 - start
    low = tl.maximum(oldest // BN, high - span + 1)
    each = tl.maximum(tl.cdiv(tl.maximum(high - low + 1, 0), tl.num_programs(1)), least)
    j = high - i_piece * each
    low = tl.maximum(low, j - each + 1)

    b_known = tl.full([BM], float("-inf"), tl.float32)
    b_total, b_count = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    b_ref = b_total if FIXED else b_known  # less the slope, as counts are less one
    b_geometric, top = b_slope, (j + 1) * BN
    steps, stopped = j * 0 + FAR, j * 0.0
    o_stats = i_bk.to(tl.int64) * pieces * n_rows
    if LATER:
        b_known, stopped = _known(STATS, o_stats, b_slope, m_m, n_rows, before, stride_s, BM, CHUNK, EXACT)
    if EARLY:
        b_forget = b_slope if EXACT else b_slope / LOG2_E  # Σ exp(δ t) over t = 0, 1, ...: by its series near 0
        b_series = -b_forget * (1.0 + b_forget * (0.5 + b_forget * (1.0 / 6.0 + b_forget * (1.0 / 24.0))))
        b_geometric = 1.0 / tl.where(b_forget > -0.05, b_series, 1.0 - tl.exp(b_forget))
        more = _keys_to_go(
            b_ref, b_total, b_known, b_count, b_slope, b_geometric, b_first, top, 0.0, bound, log_tolerance, BN, EXACT
        )
        steps = (more * (1.0 / BN)).to(tl.int32) + 1
        if (more == 0.0) | (stopped > 0.0):
            low = j + 1
            stopped = stopped * 0.0 + 1.0

    o_d = tl.arange(0, BD)
    p_q = Q + i_b * stride_qb + (o_h * stride_qh + o_t * stride_q)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & (o_d[None, :] < D), other=0.0)
    p_k = K + (i_b * stride_kb + i_hk * stride_kh) * UNIT
    p_v = V + (i_b * stride_vb + i_hk * stride_vh) * UNIT
    p_mask = MASK + i_b * stride_mb if MASKED else MASK
    o_n = tl.arange(0, BN)
    triangle = (o_n[:, None] <= o_n[None, :]).to(tl.float16)
    ones = tl.full([BN, BN], 1.0, tl.float16)
    b_counts, b_totals = tl.full([BN, BM], -1.0, tl.float32), tl.zeros([BN, BM], tl.float32)
    b_o = tl.zeros([BDV, BM], tl.float32)
    walks = j >= low
    while j >= low:
        now = tl.minimum(steps, j - low + 1)
        for step in range(now):
            b_o, b_totals, b_ref, b_counts = _decode_block(
                b_q, b_o, b_totals, b_ref, b_counts, b_slope, b_first, b_last, triangle, ones, p_k, p_v, p_mask,
                j - step, oldest, newest, stride_k * UNIT, stride_v * UNIT, stride_m, score_scale, cut,
                D, DV, BD, BDV, BN, MASKED, FIXED, EXACT, PRECISION,
            )  # fmt: skip
        j -= now
        b_total, b_count = tl.sum(b_totals, 0), tl.max(b_counts, 0) + 1.0
        if EARLY:
            walked = (top - (j + 1) * BN).to(tl.float32)
            more = _keys_to_go(
                b_ref + b_slope, b_total, b_known, b_count, b_slope, b_geometric, b_first, (j + 1) * BN, walked,
                bound, log_tolerance, BN, EXACT,
            )  # fmt: skip
            steps = (more * (1.0 / BN)).to(tl.int32) + 1
            if more == 0.0:
                low = j + 1
                stopped = stopped * 0.0 + 1.0

    o_dv = tl.arange(0, BDV)
    m_o = (o_dv < DV)[:, None] & m_m[None, :]
    if ALONE:
        b_o = b_o / tl.where(b_total == 0.0, 1.0, b_total)[None, :]
        p_o = OUT + i_b * stride_ob + (o_h * stride_oh + o_t * stride_o)[None, :] + o_dv[:, None]
        tl.store(p_o, b_o.to(OUT.dtype.element_ty), mask=m_o)
    else:
        o_row = o_stats + (before + i_piece) * n_rows + o_m
        tl.store(PARTS + (o_row * DV)[None, :] + o_dv[:, None], b_o, mask=m_o & walks)
        tl.store(STATS + o_row, b_ref + b_slope, mask=m_m)
        tl.store(STATS + stride_s + o_row, b_total, mask=m_m)
        tl.store(STATS + 2 * stride_s + o_row, b_count, mask=m_m)
        tl.store(STATS + 3 * stride_s + o_row, b_count * 0.0 + stopped, mask=m_m)


@triton.jit(do_not_specialize=["stride_s", "heads", "pieces"])
def merge_kernel(
    FORGET, PARTS, STATS, OUT, stride_fb, stride_fh, stride_f, stride_ob, stride_oh, stride_o, stride_s,
    n_queries, heads, group, pieces,
    DV: tl.constexpr, BP: tl.constexpr, BDV: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One query takes its pieces together, in BDV of its columns: the logits of each move by what newer ones count.

    What is older than a piece that stopped doesn't exist; a piece that kept nothing isn't read.
    """
    i_bh, i_t = (tl.program_id(0) // n_queries).to(tl.int64), (tl.program_id(0) % n_queries).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    slope = tl.load(FORGET + i_b * stride_fb + i_h * stride_fh + i_t * stride_f)
    if not EXACT:
        slope *= LOG2_E
    slope = tl.where(slope < -1e30, -1e30, slope)
    o_p = tl.arange(0, BP)
    m_p = o_p < pieces
    o_row = (i_bh // group * pieces + o_p) * group * n_queries + i_bh % group * n_queries + i_t
    b_ref = tl.load(STATS + o_row, mask=m_p, other=float("-inf"))
    b_total = tl.load(STATS + stride_s + o_row, mask=m_p, other=0.0)
    b_count = tl.load(STATS + 2 * stride_s + o_row, mask=m_p, other=0.0)
    b_stopped = tl.load(STATS + 3 * stride_s + o_row, mask=m_p, other=0.0)
    b_total = tl.where(tl.cumsum(b_stopped, 0) - b_stopped > 0.0, 0.0, b_total)
    b_right = tl.cumsum(b_count, 0) - b_count
    b_x = tl.where(b_total == 0.0, float("-inf"), b_ref + slope * b_right)
    highest = tl.max(b_x)
    b_w = power(b_x - tl.where(highest == float("-inf"), 0.0, highest), EXACT)
    total = tl.sum(b_total * b_w)
    o_dv = tl.program_id(1) * BDV + tl.arange(0, BDV)
    m_o = (b_w != 0.0)[:, None] & (o_dv < DV)[None, :]
    b_o = tl.load(PARTS + (o_row * DV)[:, None] + o_dv[None, :], mask=m_o, other=0.0)
    b_o = tl.sum(b_o * b_w[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    p_o = OUT + i_b * stride_ob + i_h * stride_oh + i_t * stride_o + o_dv
    tl.store(p_o, b_o.to(OUT.dtype.element_ty), mask=o_dv < DV)
