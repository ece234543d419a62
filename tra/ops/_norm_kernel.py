"""The norm of queries and keys, in place."""

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
