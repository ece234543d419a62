"""Beside a layer's products: the norm of queries and keys, in place, and the forget gates."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalise_kernel(
    X, QUERY_FACTOR, KEY_FACTOR, stride, n_rows, n_tokens, heads, kv_heads, eps,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Divides the first `heads + kv_heads` heads of X `[B T, heads, D]` by their root mean square.

    Leaves what it multiplied by, `[B, heads, T]` of queries and `[B, kv_heads, T]` of keys.
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
    X, WEIGHT, BIAS, OUT, stride_x, n_rows, n_tokens, heads,
    C: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """log σ(w · x + b) of rows X `[B T, C]`, in float32, as `[B, heads, T]`."""
    o_r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_r = o_r < n_rows
    o_h = tl.arange(0, BH)
    b_z = tl.zeros([BM, BH], tl.float32)
    for start in tl.static_range(0, C, BC):
        o_c = start + tl.arange(0, BC)
        m_c = o_c < C
        p_x = X + o_r[:, None] * stride_x + o_c[None, :]
        b_x = tl.load(p_x, mask=m_r[:, None] & m_c[None, :], other=0.0).to(tl.float32)
        for i_h in range(heads):
            b_w = tl.load(WEIGHT + i_h * C + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_sum = tl.sum(b_x * b_w[None, :], 1)
            b_z = tl.where(o_h[None, :] == i_h, b_z + b_sum[:, None], b_z)
    b_z += tl.load(BIAS + o_h, mask=o_h < heads, other=0.0).to(tl.float32)[None, :]
    b_log = tl.minimum(b_z, 0.0) - _log1p(tl.exp(-tl.abs(b_z)))
    p_out = OUT + ((o_r // n_tokens)[:, None] * heads + o_h[None, :]) * n_tokens + (o_r % n_tokens)[:, None]
    tl.store(p_out, b_log, mask=m_r[:, None] & (o_h < heads)[None, :])


@triton.jit
def _log1p(x):
    """log(1 + x) of x in 0..1, exact to rounding also near 0: 2 atanh(x / (2 + x)), by its series."""
    s = x / (2.0 + x)
    z = s * s
    terms = 1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0))
    return 2.0 * s * (1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * terms))))
