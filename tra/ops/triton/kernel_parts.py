"""Functions that the Triton kernels share. `tra/ops/README.md` has the derivation.

Names: `b_` values of a block, `p_` a pointer, `o_` offsets, `m_` a mask; capitals are tensors and constants from the
host. BM rows and BN keys make a block; BD and BDV are the widths D and DV, rounded up to a power of two.

A logit is `score_scale · (q·k) + slope · n`. In half precision scale and slope are in units of log 2, so that a weight
is a power of two, which is one instruction; FLOAT32 kernels use natural units and `exp`. A key counts when q·k isn't
at or below `raw_threshold`, and stays when it isn't at or below `raw_lower_cut` (see `tra.ops.raw_threshold`). All
kernels sum q·k in the same order, so the same keys count and stay, to the bit. Counts, references and sums are float32.

MARGIN says how the two differ: NO_MARGIN, FINITE, or INFINITE, where every visible key stays. With a margin a triangle
is without its diagonal, and distances count one key less: those of the keys to the right.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NO_MARGIN, FINITE, INFINITE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Values of MARGIN."""
SIZES = ["n_keys", "n_blocks", "seen_blocks", "heads"]
"""Arguments for whose values (1, multiples of 16) no separate kernel is compiled."""
LARGE_INDEX = tl.constexpr(1 << 30)
"""An index beyond all keys."""


@triton.jit
def load_tile(p, start, stride, end, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, EDGE: tl.constexpr):
    """Load rows `start...` of a matrix `[end, WIDTH]` as `[ROWS, PADDED]`, with 0 beyond its ends."""
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
    """Store `[ROWS, PADDED]` as rows `start...` of a matrix `[end, WIDTH]`."""
    o_row, o_column = tl.arange(0, ROWS), tl.arange(0, PADDED)
    p_tile = p + tl.cast(start, tl.int64) * stride + o_row[:, None] * stride + o_column[None, :]
    tl.store(p_tile, b.to(p.dtype.element_ty), mask=(start + o_row[:, None] < end) & (o_column[None, :] < WIDTH))


@triton.jit
def load_rows(p, start, end, ROWS: tl.constexpr, OTHER: tl.constexpr, EVEN: tl.constexpr, THREADS: tl.constexpr):
    """Load a number per row, for rows `start...`.

    Each thread loads one number, and several threads the same one. With the plain form each would load all it needs.
    """
    o_row = tl.arange(0, max(ROWS, THREADS)) % ROWS
    p_row = p + tl.cast(start, tl.int64) + o_row
    b_all = tl.load(p_row) if EVEN else tl.load(p_row, mask=start + o_row < end, other=OTHER)
    return first_elements(b_all, ROWS)


@triton.jit
def first_elements(b_all, SIZE: tl.constexpr):
    """Return the first SIZE elements, by taking halves."""
    LENGTH: tl.constexpr = b_all.shape[0]
    if LENGTH > SIZE:
        b_half, _ = tl.split(tl.trans(tl.reshape(b_all, (2, LENGTH // 2))))
        b_first = first_elements(b_half, SIZE)
    else:
        b_first = b_all
    return b_first


@triton.jit
def load_pairs(p, start, end, ROWS: tl.constexpr, EVEN: tl.constexpr, THREADS: tl.constexpr):
    """Load two neighbouring numbers per row, with one load per thread."""
    b_both = load_rows(p, 2 * start, 2 * end, 2 * ROWS, 0.0, EVEN, THREADS)
    return tl.split(tl.reshape(b_both, (ROWS, 2)))


@triton.jit
def power(x, FLOAT32: tl.constexpr):
    """Return exp(x), or 2 to the power of x in half precision."""
    return tl.exp(x) if FLOAT32 else tl.exp2(x)


@triton.jit
def log(x, FLOAT32: tl.constexpr):
    """Return the logarithm of x in the same base as `power`."""
    return tl.log(x) if FLOAT32 else tl.log2(x)


@triton.jit
def slopes(p_forget, m_m, ONLINE: tl.constexpr, FLOAT32: tl.constexpr, STEEPEST: tl.constexpr):
    """Load δ in the unit of logits.

    Where scores are bounded (not ONLINE), a slope of -STEEPEST already gives the nearest kept key all the weight.
    Steeper ones are raised to it, so that powers of the logits right of that key don't overflow. Else slopes only stay
    finite when they are multiplied by a count.
    """
    b_slope = tl.load(p_forget, mask=m_m, other=0.0)
    if not FLOAT32:
        b_slope *= LOG2_E
    LIMIT: tl.constexpr = 1e30 if ONLINE else STEEPEST
    return tl.where(b_slope < -LIMIT, -LIMIT, b_slope)  # a maximum would hide a NaN


@triton.jit
def ones_above(b_s, raw_cut, o_k, b_first, b_last, MASKED: tl.constexpr, RANGES: tl.constexpr):
    """Return 1 where a key is visible and its q·k above a cut, else 0. A NaN is above, so that it shows."""
    b_one = tl.where(b_s <= raw_cut, 0.0, 1.0)
    if MASKED:
        b_one = tl.where(o_k[None, :] <= b_last[:, None], b_one, 0.0)
        if RANGES:
            b_one = tl.where(o_k[None, :] >= b_first[:, None], b_one, 0.0)
    return b_one


@triton.jit
def weights(b_x, b_stays, MASKED: tl.constexpr, ONLINE: tl.constexpr, FLOAT32: tl.constexpr, MARGIN: tl.constexpr):
    """Return powers of logits where a key stays, else 0. Where no power can overflow, a product is enough."""
    b_p = power(b_x, FLOAT32)
    if MARGIN == INFINITE and not MASKED:
        return b_p
    return tl.where(b_stays > 0.0, b_p, 0.0) if MASKED or ONLINE or MARGIN != NO_MARGIN else b_p * b_stays


@triton.jit
def ones_triangle(SIZE: tl.constexpr, MARGIN: tl.constexpr, OF_ROWS: tl.constexpr):
    """Return the mask `[SIZE, SIZE]` whose product counts keys from j on or, with a margin, right of j.

    OF_ROWS: it multiplies from the left, and keys are rows. Else it multiplies from the right, and keys are columns.
    """
    o_n = tl.arange(0, SIZE)
    b_right, b_key = (o_n[None, :], o_n[:, None]) if OF_ROWS else (o_n[:, None], o_n[None, :])
    return b_right >= b_key if MARGIN == NO_MARGIN else b_right > b_key


@triton.jit
def counted_in_block(b_n, b_one, MARGIN: tl.constexpr):
    """Return the number of counted keys of each row: the count at the first column, that key itself included."""
    return largest_count(b_n if MARGIN == NO_MARGIN else b_n + b_one)


@triton.jit
def largest_count(b_n):
    """Return the count at the first column of each row, which is the largest.

    It is read from the first columns only, which one thread holds.
    """
    ROWS: tl.constexpr = b_n.shape[0]
    COLUMNS: tl.constexpr = b_n.shape[1]
    if COLUMNS > 8:
        b_left, _ = tl.split(tl.permute(tl.reshape(b_n, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        b_largest = largest_count(b_left)
    else:
        b_even, _ = tl.split(tl.reshape(b_n, (ROWS, COLUMNS // 2, 2)))
        b_largest = tl.max(b_even, 1)
    return b_largest


@triton.jit
def one_minus_exp(b_forget):
    """Return 1 - exp δ, by its series near 0."""
    b_series = -b_forget * (1.0 + b_forget * (0.5 + b_forget * (1.0 / 6.0 + b_forget * (1.0 / 24.0))))
    return tl.where(b_forget > -0.05, b_series, 1.0 - tl.exp(b_forget))


@triton.jit
def gradient_before_norm(b_grad, b_hat, p_factor, m, WIDTH: tl.constexpr):
    """Return the gradient of rows before RMS norm, given the gradient of the normalised rows `b_hat`."""
    b_hat = b_hat.to(tl.float32)
    b_along = tl.sum(b_grad * b_hat, 1) * (1.0 / WIDTH)
    return (b_grad - b_hat * b_along[:, None]) * tl.load(p_factor, mask=m, other=0.0)[:, None]


@triton.jit
def hash32(x):
    """Return the hash of `tra.ops.dropout`, in uint32."""
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def dropout_rows(SEED, o_row):
    """Return the hash state of each row, see `tra.ops.dropout`."""
    row_seed = hash32(tl.load(SEED).to(tl.uint32))
    return hash32(o_row.to(tl.uint32) + row_seed)


@triton.jit
def dropout_columns(SEED, o_column):
    """Return the hash state of each key, see `tra.ops.dropout`."""
    column_seed = hash32(hash32(tl.load(SEED).to(tl.uint32)) ^ tl.full([], 0x5BD1E995, tl.uint32))
    return (o_column.to(tl.uint32) + column_seed) * tl.full([], 0x9E3779B9, tl.uint32)


@triton.jit
def head_and_block(blocks, heads_sorted):
    """Return this program's head and row block (or key block): `heads_sorted` heads at a time, longest walks first.

    The last block of a head has the longest walk. `heads_sorted` divides the number of heads, see
    `tra.ops.triton.launch.heads_sorted_together`.
    """
    program = tl.program_id(0)
    place = program % (heads_sorted * blocks)
    return program // (heads_sorted * blocks) * heads_sorted + place % heads_sorted, blocks - 1 - place // heads_sorted


@triton.jit
def visible_ranges(FIRST, LAST, b, start, n_queries, n_keys, BM: tl.constexpr, BN: tl.constexpr, RANGES: tl.constexpr):
    """Return first and last key of each row, and the key blocks that a block of rows meets.

    Blocks `oldest..newest` hold a key that some row sees. In blocks `whole_from..whole_to` every row sees every key.
    """
    o_m = start + tl.arange(0, BM)
    if RANGES:
        m_m = o_m < n_queries
        p_range = tl.cast(b, tl.int64) * n_queries + o_m
        b_first = tl.load(FIRST + p_range, mask=m_m, other=0)
        b_last = tl.maximum(tl.load(LAST + p_range, mask=m_m, other=-1), -1)
        newest = (tl.max(b_last) + BN) // BN - 1  # -1 where nothing is seen
        oldest = tl.min(tl.where(m_m & (b_last >= b_first), b_first, LARGE_INDEX)) // BN
        whole_to = (tl.min(tl.where(m_m, b_last, LARGE_INDEX)) + 1) // BN - 1
        whole_from = (tl.max(b_first) + BN - 1) // BN
    else:
        b_first = tl.zeros([BM], tl.int32)
        b_last = o_m + (n_keys - n_queries)
        newest = (tl.minimum(start + BM, n_queries) - 1 + n_keys - n_queries) // BN
        oldest = newest * 0
        whole_to = (start + n_keys - n_queries + 1) // BN - 1
        whole_from = newest * 0
    return b_first, b_last, newest, oldest, whole_from, whole_to
