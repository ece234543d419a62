"""The Triton kernels of the fused operator; `tra/ops/README.md` has the derivation.

Names: `b_` a block's values, `p_` a pointer, `o_` offsets, `m_` a mask; capitals are what the host passes. A logit is
score_scale · (q·k) + slope · n; for half precision scale and slope are in units of log 2, so that a weight is a power
of two, one instruction. A key is kept when q·k, the raw product, isn't at or below `cut`, the largest float whose
product with the scale is at or below the threshold: one comparison, the same in all three kernels, on products summed
in the same order. Counts, references and sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SIZES = ["n_keys", "n_blocks", "seen", "heads"]
"""Arguments whose values (1, multiples of 16) aren't worth a kernel of their own."""
FAR = tl.constexpr(1 << 30)


@triton.jit
def _load_tile(
    p, start, stride, end, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, EDGE: tl.constexpr
):
    """Rows `start...` of a matrix `[end, WIDTH]` as `[ROWS, PADDED]`, 0 beyond its ends."""
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, PADDED)
    p_tile = p + tl.cast(start, tl.int64) * stride + o_row[:, None] * stride + o_column[None, :]
    if EDGE and PADDED > WIDTH:
        b = tl.load(p_tile, mask=(start + o_row[:, None] < end) & (o_column[None, :] < WIDTH), other=0.0)
    elif EDGE:
        b = tl.load(p_tile, mask=start + o_row[:, None] < end, other=0.0)
    elif PADDED > WIDTH:
        b = tl.load(p_tile, mask=o_column[None, :] < WIDTH, other=0.0)
    else:
        b = tl.load(p_tile)
    return b


@triton.jit
def _store_tile(p, start, stride, end, b, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, PADDED)
    p_tile = p + tl.cast(start, tl.int64) * stride + o_row[:, None] * stride + o_column[None, :]
    tl.store(p_tile, b.to(p.dtype.element_ty), mask=(start + o_row[:, None] < end) & (o_column[None, :] < WIDTH))


@triton.jit
def _load_rows(p, o_m, end, OTHER: tl.constexpr, EVEN: tl.constexpr):
    """A number per row."""
    return tl.load(p + o_m) if EVEN else tl.load(p + o_m, mask=o_m < end, other=OTHER)


@triton.jit
def _power(x, EXACT: tl.constexpr):
    """exp, or for half precision 2 to the power of x."""
    return tl.exp(x) if EXACT else tl.exp2(x)


@triton.jit
def _log(x, EXACT: tl.constexpr):
    return tl.log(x) if EXACT else tl.log2(x)


@triton.jit
def _slopes(p_forget, m_m, ONLINE: tl.constexpr, EXACT: tl.constexpr, STEEPEST: tl.constexpr):
    """δ in the unit of logits.

    Where scores are bounded (not ONLINE) the steepest slope already leaves the nearest kept key alone, and no power of
    what lies right of it overflows.
    """
    b_slope = tl.load(p_forget, mask=m_m, other=0.0)
    if not EXACT:
        b_slope *= LOG2_E
    if not ONLINE:
        b_slope = tl.where(b_slope < -STEEPEST, -STEEPEST, b_slope)  # a maximum would hide a NaN
    return b_slope


@triton.jit
def _weights(b_x, b_one, MASKED: tl.constexpr, ONLINE: tl.constexpr, EXACT: tl.constexpr):
    """Powers of logits where a key is kept, 0 elsewhere; a product where no power can overflow."""
    b_p = _power(b_x, EXACT)
    return tl.where(b_one > 0.0, b_p, 0.0) if MASKED or ONLINE else b_p * b_one


@triton.jit
def _forgotten(b_forget):
    """1 - exp δ, by its series near 0."""
    b_series = -b_forget * (1.0 + b_forget * (0.5 + b_forget * (1.0 / 6.0 + b_forget * (1.0 / 24.0))))
    return tl.where(b_forget > -0.05, b_series, 1.0 - tl.exp(b_forget))


@triton.jit
def _before_norm(b_grad, b_hat, p_factor, m, WIDTH: tl.constexpr):
    """The gradient of rows that were divided by their root mean square, from that of the result `b_hat`."""
    b_hat = b_hat.to(tl.float32)
    b_along = tl.sum(b_grad * b_hat, 1) * (1.0 / WIDTH)
    return (b_grad - b_hat * b_along[:, None]) * tl.load(p_factor, mask=m, other=0.0)[:, None]


@triton.jit
def _mix(x):
    """The hash of `_dropout.py`, in uint32."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _dropout_rows(SEED, o_row):
    row_seed = _mix(tl.load(SEED).to(tl.uint32))
    return _mix(o_row.to(tl.uint32) + row_seed)


@triton.jit
def _dropout_columns(SEED, o_column):
    column_seed = _mix(_mix(tl.load(SEED).to(tl.uint32)) ^ tl.full([], 0x5BD1E995, tl.uint32))
    return (o_column.to(tl.uint32) + column_seed) * tl.full([], 0x9E3779B9, tl.uint32)


@triton.jit
def _head_and_block(blocks, EARLY: tl.constexpr):
    """Which head and which of its blocks of rows a program has: the longest walks first.

    On full walks head by head, which share keys; where walks may stop early, blocks by their place, since a program
    that comes late is then one whose walk can't be long.
    """
    program = tl.program_id(0)
    if EARLY:
        heads = tl.num_programs(0) // blocks
        i_bh, i_m = program % heads, blocks - 1 - program // heads
    else:
        i_bh, i_m = program // blocks, blocks - 1 - program % blocks
    return i_bh, i_m


@triton.jit
def _ranges(FIRST, LAST, b, start, n_queries, n_keys, BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr):
    """First and last key of each row, and the key blocks that a block of rows meets.

    Blocks `oldest..newest` hold a key that some row sees; in `whole_from..whole_to` every row sees every key.
    """
    o_m = start + tl.arange(0, BM)
    if RANGES:
        m_m = o_m < n_queries
        p_range = tl.cast(b, tl.int64) * n_queries + o_m
        b_first = tl.load(FIRST + p_range, mask=m_m, other=0)
        b_last = tl.maximum(tl.load(LAST + p_range, mask=m_m, other=-1), -1)
        newest = (tl.max(b_last) + BN) // BN - 1  # -1 where nothing is seen
        oldest = tl.min(tl.where(m_m & (b_last >= b_first), b_first, FAR)) // BN
        whole_to = (tl.min(tl.where(m_m, b_last, FAR)) + 1) // BN - 1
        whole_from = (tl.max(b_first) + BN - 1) // BN
    else:
        b_first = tl.zeros([BM], tl.int32)
        b_last = o_m + (n_keys - n_queries)
        newest = (tl.minimum(start + BM, n_queries) - 1 + n_keys - n_queries) // BN
        oldest = newest * 0
        whole_to = (start + n_keys - n_queries + 1) // BN - 1
        whole_from = newest * 0
    return b_first, b_last, newest, oldest, whole_from, whole_to


@triton.jit
def _forward_block(
    b_q, b_o, b_total, b_ref, b_count, b_slope, b_first, b_last, b_row, triangle, p_k, p_v, SEED, j,
    stride_k, stride_v, n_keys, score_scale, cut, drop_below,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    RANGES: tl.constexpr, ONLINE: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the walk: key block j."""
    o_k = j * BN + tl.arange(0, BN)
    b_k = _load_tile(p_k, j * BN, stride_k, n_keys, D, BD, BN, MASKED)
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
        b_shrink = _power(b_ref - b_safe, EXACT)
        b_p = _power(b_x - b_safe[:, None], EXACT)
        b_total = b_total * b_shrink[:, None]
        b_o = b_o * b_shrink[:, None]
        b_ref = b_new
    else:
        b_x = b_s * score_scale + (b_slope[:, None] * b_n + (b_slope * b_count - b_ref)[:, None])
        if not MASKED and triangle.dtype == tl.bfloat16:  # which holds every power: two products in one instruction
            b_p = _power(b_x, EXACT).to(tl.bfloat16) * b_ones
        else:
            b_p = _weights(b_x, b_one, MASKED, ONLINE, EXACT)
    b_v = _load_tile(p_v, j * BN, stride_v, n_keys, DV, BDV, BN, MASKED)
    if EXACT:
        b_total += tl.sum(b_p, 1)[:, None]
    else:
        b_total = tl.dot(b_p.to(b_v.dtype), tl.full([BN, 16], 1.0, b_v.dtype), b_total)  # [BM, BN] @ [BN, 16]
    b_count += tl.max(b_n, 1)  # the count of the block's first key is the block's
    if DROPOUT:
        b_stays = _mix(b_row[:, None] ^ _dropout_columns(SEED, o_k)[None, :]) >= drop_below.to(tl.uint32)
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
            b_rest = b_bound + b_decay + _log(tl.minimum(tl.maximum(b_left, 1.0), b_geometric), EXACT)
            b_rest += (1.0 + tl.abs(b_bound) + tl.abs(b_decay)) * 1e-6  # more than what rounding can hide
            b_excess = b_rest - (b_ref + _log(tl.max(b_total, 1), EXACT) + log_tolerance)
            m_going = (b_left > 0) & ~(b_excess < 0.0)
            b_walked = (b_last - (j + 1) * BN).to(tl.float32)
            b_excess = tl.minimum(b_excess, -1.5 * log_tolerance)  # a row that has kept nothing yet
            b_keys = b_excess / tl.minimum(b_slope, -1e-30) * (b_walked + 64.0) / (-b_count - 32.0)
            b_keys = tl.where(b_keys < 16.0 * BN, tl.maximum(b_keys, 1.0), 16.0 * BN)  # a NaN walks on
            b_more = tl.where(m_going, b_keys, 0.0)
            more = tl.max(b_more)
            steps = (more * (1.0 / BN)).to(tl.int32) + 1
            if more == 0.0:
                oldest = j + 1
    return b_o, b_total, b_ref, b_count, j, oldest, steps


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, FORGET, FIRST, LAST, LONGEST, SEED, OUT, LOW, REF, TOTAL, STOP,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_fb, stride_fh, stride_f, stride_ob, stride_oh, stride_o,
    n_queries, n_keys, heads, group, score_scale, cut, bound, log_tolerance, drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RANGES: tl.constexpr, ONLINE: tl.constexpr, NORMS: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
    DROPOUT: tl.constexpr, KEEP_LOW: tl.constexpr, SHIFT: tl.constexpr, STEEPEST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries walks its keys from right to left.

    Leaves, per row: the output, and what rounding cut off it (LOW, for backward's sake); REF and TOTAL, with weight =
    exp(logit - REF) / TOTAL, or for half precision REF alone; STOP, the oldest key read.
    """
    i_bh, i_m = _head_and_block(tl.cdiv(n_queries, BM), EARLY)
    start = i_m * BM
    i_b, i_h = (i_bh // heads).to(tl.int64), (i_bh % heads).to(tl.int64)
    p_k = K + i_b * stride_kb + i_h // group * stride_kh
    p_v = V + i_b * stride_vb + i_h // group * stride_vh
    o_m = start + tl.arange(0, BM)
    m_m = o_m < n_queries
    o_row = i_bh.to(tl.int64) * n_queries + o_m
    b_q = _load_tile(Q + i_b * stride_qb + i_h * stride_qh, start, stride_q, n_queries, D, BD, BM, True)
    p_forget = FORGET + i_b * stride_fb + i_h * stride_fh + o_m.to(tl.int64) * stride_f
    b_slope = _slopes(p_forget, m_m, ONLINE, EXACT, STEEPEST)
    b_first, b_last, newest, oldest, whole_from, whole_to = _ranges(
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
        b_geometric = 1.0 / _forgotten(b_forget)
        b_first = tl.where(m_m & (b_last >= b_first), b_first, FAR)  # rows that see nothing hold nobody up

    b_ref = b_bound + b_slope - SHIFT  # no logit is higher: the nearest kept key has n = 1
    if ONLINE:
        b_ref = tl.full([BM], float("-inf"), tl.float32)
    b_row = _dropout_rows(SEED, o_row) if DROPOUT else o_m
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
    _store_tile(OUT + i_b * stride_ob + i_h * stride_oh, start, stride_o, n_queries, b_o, DV, BDV, BM)
    if KEEP_LOW:
        b_low = b_o - b_o.to(OUT.dtype.element_ty).to(tl.float32)
        _store_tile(LOW + i_b * stride_ob + i_h * stride_oh, start, stride_o, n_queries, b_low, DV, BDV, BM)
    b_ref = tl.where(b_empty, 1e30, b_ref)
    if EXACT:
        tl.store(TOTAL + o_row, b_total, mask=m_m)
    else:
        b_ref += tl.log2(b_total)
    tl.store(REF + o_row, b_ref, mask=m_m)
    tl.store(STOP + o_row, tl.zeros([BM], tl.int32) + tl.minimum(oldest, newest + 1) * BN, mask=m_m)


@triton.jit
def _query_gradient_block(
    b_q, b_do, b_dq, b_dforget, b_surplus, b_distance, b_mean, b_count, b_slope, b_ref, b_scale, b_inner, b_first,
    b_last, b_row, m_m, triangle, p_k, p_v, p_offsets, SEED, j, stride_k, stride_v, stride_c, n_keys, score_scale, cut,
    drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, COARSER: tl.constexpr,
    MASKED: tl.constexpr, RANGES: tl.constexpr, ONLINE: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    o_k = j * BN + tl.arange(0, BN)
    b_k = _load_tile(p_k, j * BN, stride_k, n_keys, D, BD, BN, MASKED)
    b_v = _load_tile(p_v, j * BN, stride_v, n_keys, DV, BDV, BN, MASKED)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)  # [BM, BD] @ [BD, BN] -> [BM, BN]
    b_one = tl.where(b_s <= cut, 0.0, 1.0)
    if MASKED:
        b_one = tl.where(o_k[None, :] <= b_last[:, None], b_one, 0.0)
        if RANGES:
            b_one = tl.where(o_k[None, :] >= b_first[:, None], b_one, 0.0)
    b_offset = b_slope * b_count - b_ref
    m_first = (j + 1) % COARSER == 0  # of the keys that are one block for the other kernel
    tl.store(p_offsets + tl.cast(j // COARSER, tl.int64) * stride_c, b_offset, mask=m_m & m_first)
    b_n = tl.dot(b_one.to(tl.float16), triangle)  # [BM, BN] @ [BN, BN] -> [BM, BN]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)  # [BM, BDV] @ [BDV, BN] -> [BM, BN]
    b_x = b_s * score_scale + (b_slope[:, None] * b_n + b_offset[:, None])
    b_p = _weights(b_x, b_one, MASKED, ONLINE, EXACT)
    if EXACT:
        b_p *= b_scale[:, None]
    if DROPOUT:
        b_stays = _mix(b_row[:, None] ^ _dropout_columns(SEED, o_k)[None, :]) >= drop_below.to(tl.uint32)
        b_dp = tl.where(b_stays, b_dp * drop_scale, 0.0)
    b_ds = b_p * (b_dp - b_inner[:, None])
    b_n += b_count[:, None]
    b_dforget += tl.sum(b_ds * b_n, 1)
    if EXACT:
        b_surplus += tl.sum(b_ds, 1)
        b_distance += tl.sum(b_p * b_n, 1)
        b_mean = tl.dot(b_p, b_k, b_mean, input_precision=PRECISION)  # [BM, BN] @ [BN, BD] -> [BM, BD]
    b_count = tl.max(b_n, 1)  # n only grows to the left
    b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)  # [BM, BN] @ [BN, BD] -> [BM, BD]
    return b_dq, b_dforget, b_surplus, b_distance, b_mean, b_count


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    Q, K, V, FORGET, FIRST, LAST, SEED, OUT, LOW, DOUT, REF, TOTAL, STOP, FACTOR, DQ, DFORGET, INNER, SLOPES, OFFSETS,
    SPAN,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_fb, stride_fh, stride_f, stride_ob, stride_oh, stride_o, stride_gb, stride_gh, stride_g,
    stride_dqb, stride_dqh, stride_dq, stride_dfb, stride_dfh, stride_df,
    chunk, n_rows, n_blocks, n_queries, n_keys, heads, group, scale, score_scale, cut, drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    COARSER: tl.constexpr, RANGES: tl.constexpr, ONLINE: tl.constexpr, EARLY: tl.constexpr, EXACT: tl.constexpr,
    DROPOUT: tl.constexpr, BEFORE: tl.constexpr, STEEPEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The forward's walk again, for the gradients of queries and gates, over rows `chunk...` of `n_rows`.

    Leaves for `key_gradient_kernel`: INNER, Σ P dP per row; SLOPES; OFFSETS `[B H, n_blocks, n_rows]`, slope · (keys
    kept right of a key block) - REF; SPAN `[B H, row blocks, 2]`, the oldest and newest key block visited. A block of
    keys is COARSER times as long there. BEFORE: gradients are those of queries before their norm, which multiplied rows
    by FACTOR, and of gates before log σ.
    """
    blocks = n_rows // BM
    i_bh, i_m = _head_and_block(blocks, EARLY)
    start = chunk + i_m * BM
    i_b, i_h = (i_bh // heads).to(tl.int64), (i_bh % heads).to(tl.int64)
    p_k = K + i_b * stride_kb + i_h // group * stride_kh
    p_v = V + i_b * stride_vb + i_h // group * stride_vh
    o_m = start + tl.arange(0, BM)
    m_m = o_m < n_queries
    o_row = i_bh.to(tl.int64) * n_queries + o_m
    b_q = _load_tile(Q + i_b * stride_qb + i_h * stride_qh, start, stride_q, n_queries, D, BD, BM, True)
    b_do = _load_tile(DOUT + i_b * stride_gb + i_h * stride_gh, start, stride_g, n_queries, DV, BDV, BM, True)
    b_out = _load_tile(OUT + i_b * stride_ob + i_h * stride_oh, start, stride_o, n_queries, DV, BDV, BM, True)
    if EXACT:
        b_inner = tl.sum(b_do.to(tl.float64) * b_out.to(tl.float64), 1).to(tl.float32)
    else:
        b_low = _load_tile(LOW + i_b * stride_ob + i_h * stride_oh, start, stride_o, n_queries, DV, BDV, BM, True)
        b_inner = tl.sum(b_do.to(tl.float32) * (b_out.to(tl.float32) + b_low.to(tl.float32)), 1)
    p_forget = FORGET + i_b * stride_fb + i_h * stride_fh + o_m.to(tl.int64) * stride_f
    b_slope = _slopes(p_forget, m_m, ONLINE, EXACT, STEEPEST)
    tl.store(SLOPES + o_row, b_slope, mask=m_m)
    b_ref = tl.load(REF + o_row, mask=m_m, other=0.0)
    b_scale = 1.0 / tl.load(TOTAL + o_row, mask=m_m, other=1.0) if EXACT else b_ref
    b_first, b_last, newest, oldest, whole_from, whole_to = _ranges(
        FIRST, LAST, i_b, start, n_queries, n_keys, BM, BN, RANGES
    )
    oldest = tl.min(tl.load(STOP + o_row, mask=m_m, other=FAR)) // BN
    p_span = SPAN + (tl.cast(i_bh, tl.int64) * blocks + i_m) * 2
    tl.store(p_span, oldest // COARSER)
    tl.store(p_span + 1, (newest + COARSER) // COARSER - 1)  # -1 where nothing is seen

    p_offsets = OFFSETS + tl.cast(i_bh, tl.int64) * n_blocks * n_rows + i_m * BM + tl.arange(0, BM)
    if COARSER > 1:  # the newest block may begin in the middle of the other kernel's
        tl.store(p_offsets + tl.cast(newest // COARSER, tl.int64) * n_rows, -b_ref, mask=m_m & (newest >= 0))
    b_row = _dropout_rows(SEED, o_row) if DROPOUT else o_m
    o_n = tl.arange(0, BN)
    triangle = (o_n[:, None] >= o_n[None, :]).to(tl.float16)
    b_dq = tl.zeros([BM, BD], tl.float32)
    b_dforget, b_count = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    b_surplus, b_distance = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    b_mean = tl.zeros([BM, BD], tl.float32) if EXACT else b_inner
    for PHASE in tl.static_range(3 if RANGES else 2):
        end = whole_to + 1 if PHASE == 0 else whole_from if PHASE == 1 else 0
        end = tl.maximum(end, oldest)
        for step in range(newest + 1 - end):
            b_dq, b_dforget, b_surplus, b_distance, b_mean, b_count = _query_gradient_block(
                b_q, b_do, b_dq, b_dforget, b_surplus, b_distance, b_mean, b_count, b_slope, b_ref, b_scale, b_inner,
                b_first, b_last, b_row, m_m, triangle, p_k, p_v, p_offsets, SEED, newest - step, stride_k, stride_v,
                n_rows, n_keys, score_scale, cut, drop_below, drop_scale,
                D, DV, BD, BDV, BN, COARSER, PHASE != 1, RANGES, ONLINE, EXACT, DROPOUT, PRECISION,
            )  # fmt: skip
        newest = tl.minimum(newest, end - 1)
    if EXACT:
        # Σ dS should be 0. By as much as Σ P dP was off it is -off, Σ dS n is off by -off · Σ P n, and Σ dS k likewise.
        b_dforget -= b_surplus * b_distance
        b_dq -= b_surplus[:, None] * b_mean
        b_inner += b_surplus
    tl.store(INNER + o_row, b_inner, mask=m_m)
    p_dq = DQ + i_b * stride_dqb + i_h * stride_dqh
    b_dq *= scale
    if BEFORE:  # queries are read again: held all the way they would cost the loop registers
        b_q = _load_tile(Q + i_b * stride_qb + i_h * stride_qh, start, stride_q, n_queries, D, BD, BM, True)
        b_dq = _before_norm(b_dq, b_q, FACTOR + o_row, m_m, D)
    _store_tile(p_dq, start, stride_dq, n_queries, b_dq, D, BD, BM)
    if BEFORE:
        b_dforget *= _forgotten(b_slope if EXACT else b_slope / LOG2_E)
    p_dforget = DFORGET + i_b * stride_dfb + i_h * stride_dfh + o_m.to(tl.int64) * stride_df
    tl.store(p_dforget, b_dforget, mask=m_m)


@triton.jit
def _key_gradient_block(
    b_k, b_v, b_dk, b_dv, o_k, b_column, triangle, p_q, p_do, FIRST, LAST, SEED, p_total, p_inner, p_slopes, p_offsets,
    i_b, i_bh, start, chunk, stride_q, stride_g, n_queries, n_keys, score_scale, cut, drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, RANGES: tl.constexpr, ONLINE: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a block of queries adds to a block of keys. Transposed: keys are rows here."""
    o_m = start + tl.arange(0, BM)
    b_q = _load_tile(p_q, start, stride_q, n_queries, D, BD, BM, not EVEN)
    b_do = _load_tile(p_do, start, stride_g, n_queries, DV, BDV, BM, not EVEN)
    b_slope = _load_rows(p_slopes, o_m, n_queries, 0.0, EVEN)
    b_inner = _load_rows(p_inner, o_m, n_queries, 0.0, EVEN)
    b_offset = _load_rows(p_offsets, o_m, n_queries, 0.0, EVEN)
    if EXACT:
        b_scale = 1.0 / _load_rows(p_total, o_m, n_queries, 1.0, EVEN)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)  # [BN, BD] @ [BD, BM] -> [BN, BM]
    b_one = tl.where(b_s <= cut, 0.0, 1.0)
    if MASKED:
        if RANGES:
            b_first = _load_rows(FIRST + i_b * n_queries, o_m, n_queries, FAR, EVEN)
            b_last = _load_rows(LAST + i_b * n_queries, o_m, n_queries, -1, EVEN)
            b_one = tl.where(o_k[:, None] >= b_first[None, :], b_one, 0.0)
        else:
            b_last = o_m + (n_keys - n_queries)
        b_one = tl.where(o_k[:, None] <= b_last[None, :], b_one, 0.0)
    b_ones = b_one.to(triangle.dtype)
    b_n = tl.dot(triangle, b_ones)  # [BN, BN] @ [BN, BM] -> [BN, BM]
    b_x = b_s * score_scale + (b_slope[None, :] * b_n + b_offset[None, :])
    if triangle.dtype == tl.bfloat16 and not MASKED and not ONLINE:
        b_p = _power(b_x, EXACT).to(tl.bfloat16) * b_ones
    else:
        b_p = _weights(b_x, b_one, MASKED, ONLINE, EXACT)
    if EXACT:
        b_p *= b_scale[None, :]
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)  # [BN, BDV] @ [BDV, BM] -> [BN, BM]
    b_used = b_p
    if DROPOUT:
        b_stays = _mix(b_column[:, None] ^ _dropout_rows(SEED, i_bh * n_queries + o_m)[None, :]) >= drop_below.to(
            tl.uint32
        )
        b_dp = tl.where(b_stays, b_dp * drop_scale, 0.0)
        b_used = tl.where(b_stays, b_p * drop_scale, 0.0)
    b_dv = tl.dot(b_used.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)  # [BN, BM] @ [BM, BDV] -> [BN, BDV]
    b_ds = b_p * (b_dp - b_inner[None, :]).to(b_p.dtype)
    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)  # [BN, BM] @ [BM, BD] -> [BN, BD]
    return b_dk, b_dv


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    Q, K, V, FIRST, LAST, SEED, DOUT, TOTAL, FACTOR, DK, DV_OUT, INNER, SLOPES, OFFSETS, SPAN,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kh, stride_k, stride_vb, stride_vh, stride_v,
    stride_gb, stride_gh, stride_g,
    stride_dkb, stride_dkh, stride_dk, stride_dvb, stride_dvh, stride_dv,
    seen, chunk, n_rows, n_blocks, n_queries, n_keys, heads, group, scale, score_scale, cut, drop_below, drop_scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RATIO: tl.constexpr, EVEN: tl.constexpr, RANGES: tl.constexpr, SKIP: tl.constexpr, ACCUMULATE: tl.constexpr,
    ONLINE: tl.constexpr, EXACT: tl.constexpr, DROPOUT: tl.constexpr, BEFORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of keys gathers its gradients from the row blocks of a chunk whose walk came by, in their order.

    SKIP: some walks stopped early or started late, so each is asked; RATIO of the row blocks here make one there.
    EVEN: no row block reaches beyond the queries. ACCUMULATE: on top of former chunks' sums. BEFORE: the
    gradient is that of keys before their norm, which multiplied rows by FACTOR.
    """
    j = tl.program_id(0) % seen  # oldest keys first: most queries see them
    i_bk = tl.program_id(0) // seen
    kv_heads = heads // group
    i_b, i_hk = (i_bk // kv_heads).to(tl.int64), (i_bk % kv_heads).to(tl.int64)
    o_n = tl.arange(0, BN)
    o_k = j * BN + o_n
    b_k = _load_tile(K + i_b * stride_kb + i_hk * stride_kh, j * BN, stride_k, n_keys, D, BD, BN, True)
    b_v = _load_tile(V + i_b * stride_vb + i_hk * stride_vh, j * BN, stride_v, n_keys, DV, BDV, BN, True)
    triangle = (o_n[:, None] <= o_n[None, :]).to(tl.bfloat16 if V.dtype.element_ty == tl.bfloat16 else tl.float16)
    b_column = _dropout_columns(SEED, o_k) if DROPOUT else o_k
    b_dk, b_dv = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)

    blocks = n_rows // BM
    touched = 0
    for i_g in range(group):
        i_h = i_hk * group + i_g
        i_bh = i_b * heads + i_h
        p_q = Q + i_b * stride_qb + i_h * stride_qh
        p_do = DOUT + i_b * stride_gb + i_h * stride_gh
        p_total, p_inner = TOTAL + i_bh * n_queries, INNER + i_bh * n_queries
        p_slopes, p_offsets = SLOPES + i_bh * n_queries, OFFSETS + (i_bh * n_blocks + j) * n_rows - chunk
        p_span = SPAN + i_bh * (blocks // RATIO) * 2
        if SKIP:  # the first and the last row block that came by
            low, high = FAR + j * 0, j * 0 - 1
            for part in range(tl.cdiv(blocks, 256 * RATIO)):
                o_i = part * 256 + tl.arange(0, 256)
                m_i = o_i < blocks // RATIO
                b_oldest = tl.load(p_span + 2 * o_i, mask=m_i, other=FAR)
                b_newest = tl.load(p_span + 2 * o_i + 1, mask=m_i, other=-1)
                m_came = (b_oldest <= j) & (j <= b_newest)
                low = tl.minimum(low, tl.min(tl.where(m_came, o_i * RATIO, FAR)))
                high = tl.maximum(high, tl.max(tl.where(m_came, o_i * RATIO + RATIO - 1, -1)))
        else:
            low, high = tl.maximum(j * BN - (n_keys - n_queries) - chunk, 0) // BM, blocks - 1
        whole = (tl.maximum(j * BN + BN - 1 - (n_keys - n_queries) - chunk, 0) + BM - 1) // BM
        if RANGES:
            whole = high + 1
        whole = tl.minimum(tl.maximum(whole, low), high + 1)
        touched = tl.maximum(touched, high + 1 - low)
        for PHASE in tl.static_range(2):
            for i_m in range(low if PHASE == 0 else whole, whole if PHASE == 0 else high + 1):
                came = True
                if SKIP:
                    p_came = p_span + i_m // RATIO * 2
                    came = (tl.load(p_came) <= j) & (j <= tl.load(p_came + 1))
                if came:
                    b_dk, b_dv = _key_gradient_block(
                        b_k, b_v, b_dk, b_dv, o_k, b_column, triangle, p_q, p_do, FIRST, LAST, SEED, p_total, p_inner,
                        p_slopes, p_offsets, i_b, i_bh, chunk + i_m * BM, chunk, stride_q, stride_g, n_queries, n_keys,
                        score_scale, cut, drop_below, drop_scale,
                        D, DV, BD, BDV, BM, PHASE == 0, EVEN, RANGES, ONLINE, EXACT, DROPOUT, PRECISION,
                    )  # fmt: skip
    b_dk *= scale
    p_dk = DK + i_b * stride_dkb + i_hk * stride_dkh
    p_dv = DV_OUT + i_b * stride_dvb + i_hk * stride_dvh
    if ACCUMULATE:
        if touched > 0:
            b_dk += _load_tile(p_dk, j * BN, stride_dk, n_keys, D, BD, BN, True)
            b_dv += _load_tile(p_dv, j * BN, stride_dv, n_keys, DV, BDV, BN, True)
            _store_tile(p_dk, j * BN, stride_dk, n_keys, b_dk, D, BD, BN)
            _store_tile(p_dv, j * BN, stride_dv, n_keys, b_dv, DV, BDV, BN)
    else:
        _store_tile(p_dv, j * BN, stride_dv, n_keys, b_dv, DV, BDV, BN)
        if BEFORE:  # keys are read again, likewise, and after a store, or the compiler would hold them
            b_k = _load_tile(K + i_b * stride_kb + i_hk * stride_kh, j * BN, stride_k, n_keys, D, BD, BN, True)
            b_dk = _before_norm(b_dk, b_k, FACTOR + i_bk.to(tl.int64) * n_keys + o_k, o_k < n_keys, D)
        _store_tile(p_dk, j * BN, stride_dk, n_keys, b_dk, D, BD, BN)
