"""What the Triton kernels of the walk share; `tra/ops/README.md` has the derivation.

Names: `b_` a block's values, `p_` a pointer, `o_` offsets, `m_` a mask; capitals are what the host passes. A logit is
score_scale · (q·k) + slope · n; for half precision scale and slope are in units of log 2, so that a weight is a power
of two, one instruction. A key is kept when q·k, the raw product, isn't at or below `cut`, the largest float whose
product with the scale is at or below the threshold: one comparison, the same in all kernels, on products summed
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
def load_tile(p, start, stride, end, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, EDGE: tl.constexpr):
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
def store_tile(p, start, stride, end, b, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, PADDED)
    p_tile = p + tl.cast(start, tl.int64) * stride + o_row[:, None] * stride + o_column[None, :]
    tl.store(p_tile, b.to(p.dtype.element_ty), mask=(start + o_row[:, None] < end) & (o_column[None, :] < WIDTH))


@triton.jit
def load_rows(p, start, end, ROWS: tl.constexpr, OTHER: tl.constexpr, EVEN: tl.constexpr, THREADS: tl.constexpr):
    """A number per row, of rows `start...`. Each thread loads one, some the same: else it would load all it needs."""
    o_row = tl.arange(0, max(ROWS, THREADS)) % ROWS
    p_row = p + tl.cast(start, tl.int64) + o_row
    b_all = tl.load(p_row) if EVEN else tl.load(p_row, mask=start + o_row < end, other=OTHER)
    return first_of(b_all, ROWS)


@triton.jit
def first_of(b_all, SIZE: tl.constexpr):
    """The first numbers, by halves."""
    LENGTH: tl.constexpr = b_all.shape[0]
    if LENGTH > SIZE:
        b_half, _ = tl.split(tl.trans(tl.reshape(b_all, (2, LENGTH // 2))))
        b_first = first_of(b_half, SIZE)
    else:
        b_first = b_all
    return b_first


@triton.jit
def load_pairs(p, start, end, ROWS: tl.constexpr, EVEN: tl.constexpr, THREADS: tl.constexpr):
    """Two numbers per row that lie beside each other, by one load a thread."""
    b_both = load_rows(p, 2 * start, 2 * end, 2 * ROWS, 0.0, EVEN, THREADS)
    return tl.split(tl.reshape(b_both, (ROWS, 2)))


@triton.jit
def power(x, EXACT: tl.constexpr):
    """exp, or for half precision 2 to the power of x."""
    return tl.exp(x) if EXACT else tl.exp2(x)


@triton.jit
def log(x, EXACT: tl.constexpr):
    return tl.log(x) if EXACT else tl.log2(x)


@triton.jit
def slopes(p_forget, m_m, ONLINE: tl.constexpr, EXACT: tl.constexpr, STEEPEST: tl.constexpr):
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
def weights(b_x, b_one, MASKED: tl.constexpr, ONLINE: tl.constexpr, EXACT: tl.constexpr):
    """Powers of logits where a key is kept, 0 elsewhere; a product where no power can overflow."""
    b_p = power(b_x, EXACT)
    return tl.where(b_one > 0.0, b_p, 0.0) if MASKED or ONLINE else b_p * b_one


@triton.jit
def leftmost(b_n):
    """The largest of each row, where numbers never grow to the right: of its first columns, which a thread has."""
    ROWS: tl.constexpr = b_n.shape[0]
    COLUMNS: tl.constexpr = b_n.shape[1]
    if COLUMNS > 8:
        b_left, _ = tl.split(tl.permute(tl.reshape(b_n, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        b_most = leftmost(b_left)
    else:
        b_even, _ = tl.split(tl.reshape(b_n, (ROWS, COLUMNS // 2, 2)))
        b_most = tl.max(b_even, 1)
    return b_most


@triton.jit
def forgotten(b_forget):
    """1 - exp δ, by its series near 0."""
    b_series = -b_forget * (1.0 + b_forget * (0.5 + b_forget * (1.0 / 6.0 + b_forget * (1.0 / 24.0))))
    return tl.where(b_forget > -0.05, b_series, 1.0 - tl.exp(b_forget))


@triton.jit
def before_norm(b_grad, b_hat, p_factor, m, WIDTH: tl.constexpr):
    """The gradient of rows that were divided by their root mean square, from that of the result `b_hat`."""
    b_hat = b_hat.to(tl.float32)
    b_along = tl.sum(b_grad * b_hat, 1) * (1.0 / WIDTH)
    return (b_grad - b_hat * b_along[:, None]) * tl.load(p_factor, mask=m, other=0.0)[:, None]


@triton.jit
def mix(x):
    """The hash of `_dropout.py`, in uint32."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def dropout_rows(SEED, o_row):
    row_seed = mix(tl.load(SEED).to(tl.uint32))
    return mix(o_row.to(tl.uint32) + row_seed)


@triton.jit
def dropout_columns(SEED, o_column):
    column_seed = mix(mix(tl.load(SEED).to(tl.uint32)) ^ tl.full([], 0x5BD1E995, tl.uint32))
    return (o_column.to(tl.uint32) + column_seed) * tl.full([], 0x9E3779B9, tl.uint32)


@triton.jit
def head_and_block(blocks, together):
    """Which head and which of its blocks a program has: of `together` heads at a time, the longest walks first.

    A head's last block has the longest walk. `_launch.py` says how many heads, of which their number is a multiple.
    """
    program = tl.program_id(0)
    place = program % (together * blocks)
    return program // (together * blocks) * together + place % together, blocks - 1 - place // together


@triton.jit
def ranges(FIRST, LAST, b, start, n_queries, n_keys, BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr):
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
