"""Kernels beside a layer's products: norm of queries and keys, in place; forget gates; their bias's gradient."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalise_kernel(
    X, QUERY_FACTOR, KEY_FACTOR, stride, n_rows, n_tokens, heads, kv_heads, eps,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Divide the first `heads + kv_heads` heads of X `[B T, heads, D]` by their root mean square.

    Leaves the factors, `[B, heads, T]` of queries and `[B, kv_heads, T]` of keys.
    """
    i_h = tl.program_id(0) % (heads + kv_heads)
    o_r = (tl.program_id(0) // (heads + kv_heads)).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    m_r = o_r < n_rows
    m = m_r[:, None] & (o_d < D)[None, :]
    p_x = X + o_r[:, None] * stride + i_h * D + o_d[None, :]
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    b_root = tl.sqrt_rn(tl.sum(b_x * b_x, 1) / D + eps)
    b_factor = tl.div_rn(tl.full([BM], 1.0, tl.float32), b_root)
    tl.store(p_x, b_x * b_factor[:, None], mask=m)
    o_b, o_t = o_r // n_tokens, o_r % n_tokens
    tl.store(QUERY_FACTOR + (o_b * heads + i_h) * n_tokens + o_t, b_factor, mask=m_r & (i_h < heads))
    tl.store(KEY_FACTOR + (o_b * kv_heads + i_h - heads) * n_tokens + o_t, b_factor, mask=m_r & (i_h >= heads))


@triton.jit
def gate_kernel(
    X, WEIGHT, BIAS, OUT, n_rows, n_tokens, heads,
    C: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute log σ(w · x + b) of rows X `[B T, C]`, in float32, as `[B, heads, T]`; a program has BH of the heads."""
    o_r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_r = o_r < n_rows
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    b_z = tl.zeros([BM, BH], tl.float64)  # tensor cores cut off what they add to a sum: each block has its own
    for start in range(0, C, BC):
        o_c = start + tl.arange(0, BC)
        m_c = o_c < C
        b_x = tl.load(X + o_r[:, None] * C + o_c[None, :], mask=m_r[:, None] & m_c[None, :], other=0.0)
        p_w = WEIGHT + o_h[None, :] * C + o_c[:, None]
        b_w = tl.load(p_w, mask=m_c[:, None] & (o_h < heads)[None, :], other=0.0).to(tl.float32)
        if X.dtype.element_ty == tl.bfloat16:  # three bfloat16 are a float32, and their products exact
            b_high = b_w.to(tl.bfloat16)
            b_w -= b_high.to(tl.float32)
            b_middle = b_w.to(tl.bfloat16)
            b_low = (b_w - b_middle.to(tl.float32)).to(tl.bfloat16)
            b_rest = tl.dot(b_x, b_middle, tl.dot(b_x, b_low))  # [BM, BC] @ [BC, BH] -> [BM, BH]
            b_z += tl.dot(b_x, b_high).to(tl.float64) + b_rest.to(tl.float64)
        else:
            b_z += tl.dot(b_x.to(tl.float32), b_w, input_precision="ieee").to(tl.float64)
    b_z += tl.load(BIAS + o_h, mask=o_h < heads, other=0.0).to(tl.float64)[None, :]
    b_power = tl.abs(b_z) * -1.4426950408889634  # its rounding would be an error of σ near 1, so exp2 has two parts
    b_power = tl.where(b_power < -1000.0, -1000.0, b_power)  # infinite parts would be NaN; a NaN stays
    b_whole = b_power.to(tl.float32)
    b_exp = tl.exp2(b_whole) * (1.0 + 0.6931472 * (b_power - b_whole.to(tl.float64)).to(tl.float32))
    b_log = tl.minimum(b_z, 0.0).to(tl.float32) - _log1p(b_exp)
    p_out = OUT + ((o_r // n_tokens)[:, None] * heads + o_h[None, :]) * n_tokens + (o_r % n_tokens)[:, None]
    tl.store(p_out, b_log, mask=m_r[:, None] & (o_h < heads)[None, :])


@triton.jit
def bias_kernel(X, OUT, stride, n_rows, columns, BH: tl.constexpr, BM: tl.constexpr):
    """Sum rows X `[n_rows, columns]`, those of each program separately: OUT `[columns, programs]`."""
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    b_sum = tl.zeros([BM, BH], tl.float32)
    for start in range(tl.program_id(0) * BM, n_rows, tl.num_programs(0) * BM):
        o_r = tl.cast(start, tl.int64) + tl.arange(0, BM)
        m = (o_r < n_rows)[:, None] & (o_h < columns)[None, :]
        b_sum += tl.load(X + o_r[:, None] * stride + o_h[None, :], mask=m, other=0.0).to(tl.float32)
    tl.store(OUT + o_h * tl.num_programs(0) + tl.program_id(0), tl.sum(b_sum, 0), mask=o_h < columns)


@triton.jit
def _log1p(x):
    """Return log(1 + x) of x in 0..1, exact to rounding also near 0: 2 atanh(x / (2 + x)), by its series."""
    s = x / (2.0 + x)
    z = s * s
    terms = 1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0))
    return 2.0 * s * (1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * terms))))
