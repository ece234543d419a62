"""The softmax over a vocabulary, one row per program: its loss, and its gradient in place of the logits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    logits,  # [M, V], becomes its own gradient when GRADIENT
    targets,  # [M]
    row_weights,  # [M], what a row's loss counts for
    losses,  # [M], float32
    right,  # [M], int8: the target is the likeliest, the first of equals
    row_stride,
    V,
    GRADIENT: tl.constexpr,
    BV: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_logits = logits + row * row_stride
    target = tl.load(targets + row)
    b_max = tl.full([BV], float("-inf"), tl.float32)
    b_where = tl.full([BV], 0, tl.int32)
    b_sum = tl.zeros([BV], tl.float32)
    # Every lane keeps a running maximum and sum of its own; they are joined once, at the end.
    for start in range(0, V, BV):
        o_v = start + tl.arange(0, BV)
        b_x = tl.load(p_logits + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_max, b_x)
        b_where = tl.where(b_x > b_max, o_v, b_where)
        b_old = tl.where(b_max == b_new, 1.0, tl.exp(b_max - b_new))
        b_sum = b_sum * b_old + tl.where(b_x == float("-inf"), 0.0, tl.exp(b_x - b_new))
        b_max = b_new
    top = tl.max(b_max, 0)
    likeliest = tl.min(tl.where(b_max == top, b_where, V), 0)
    total = tl.sum(tl.where(b_max == float("-inf"), 0.0, b_sum * tl.exp(b_max - top)), 0)
    below = top - tl.load(p_logits + target).to(tl.float32)  # exact before the logarithm comes in
    tl.store(losses + row, below + tl.log(total))
    tl.store(right + row, (likeliest == target).to(tl.int8))
    if GRADIENT:
        weight = tl.load(row_weights + row)
        part = 1.0 / total
        for start in range(0, V, BV):
            o_v = start + tl.arange(0, BV)
            b_x = tl.load(p_logits + o_v, mask=o_v < V, other=float("-inf")).to(tl.float32)
            b_g = (tl.exp(b_x - top) * part - tl.where(o_v == target, 1.0, 0.0)) * weight
            tl.store(p_logits + o_v, b_g.to(logits.dtype.element_ty), mask=o_v < V)
