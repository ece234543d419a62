"""A bias a_i · b_j on the logits, as further columns of queries and keys: plain softmax attention then adds it.

Every mechanism whose bias factors like this runs on the fused kernels of `scaled_dot_product_attention`, with memory
linear in length. A term that depends on the query alone falls out of the softmax: `m (j - i)` is `m · j`, and a sum of
gates from j to i is minus the running sum at j.

The columns go through bfloat16 (and TF32) without rounding: a factor is split into pieces of 8 significant bits, each
of which is exact there, and products are summed in float32.

Gradients of the factors are not exact: they are sums over all keys that should nearly cancel, but whose rounding
errors don't (in bfloat16, at length 1024, 9 % off for FoT's gates, 150 % for a gate times the distance). So a learnt
factor takes this path without gradients only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention.shared.inputs import AttentionInputs, softmax_attention
from tra.ops.compiler_workarounds import is_exporting, truncate_to_bfloat16

PIECES = 3
"""24 bits in pieces of 8."""


def can_use_bias_columns(inputs: AttentionInputs) -> bool:
    """Return whether a mechanism with learnt factors may use columns.

    Large factors exceed the range of float16. Factors are split by their bits, which only torch can do, so exported
    graphs have no columns.
    """
    return not torch.is_grad_enabled() and inputs.query.dtype != torch.float16 and not is_exporting()


def split_bits(x: Tensor) -> list[Tensor]:
    """Return pieces that add up to x, each exact in bfloat16: the upper bits of x, then of what is left."""
    parts, rest = [], x.float()
    for _ in range(PIECES):
        part = truncate_to_bfloat16(rest)
        parts.append(part)
        rest = rest - part
    return parts


def biased_softmax_attention(
    inputs: AttentionInputs, query_factor: Tensor | None, key_factor: Tensor, dropout: float = 0.0
) -> Tensor:
    """Run softmax attention over `q_i · k_j / √D + a_i b_j`.

    Args:
        query_factor: a, `[B or 1, H, Tq or 1]`, float32 (float64 with float64 queries), without gradients; None is 1.
        key_factor: b, `[B or 1, H or 1, Tk]`, the same.
    """
    batch, heads, n_queries, width = inputs.query.shape
    n_keys = inputs.key.shape[2]
    key_factor = key_factor - key_factor[..., -1:]  # no change to a softmax; small numbers near the last queries
    # The kernel's scale multiplies the columns too. Without a query factor, the key factor undoes it.
    if query_factor is None:
        key_factor = key_factor * width**0.5
        query_factor = torch.ones(1, 1, 1, dtype=key_factor.dtype, device=key_factor.device)
        pieces = [key_factor] if key_factor.dtype == torch.float64 else split_bits(key_factor)
        pairs = [(query_factor, piece) for piece in pieces]
    elif key_factor.dtype == torch.float64:
        pairs = [(query_factor * width**0.5, key_factor)]
    else:  # products of pieces below 2^-22 of the whole are left out
        left, right = split_bits(query_factor * width**0.5), split_bits(key_factor)
        pairs = [(a, b) for i, a in enumerate(left) for j, b in enumerate(right) if i + j < PIECES]
    padding = -(width + len(pairs)) % 8  # fused kernels need widths that are multiples of 8
    columns = [
        torch.stack([part.expand(batch, heads, length) for part in side], dim=-1).to(inputs.query.dtype)
        for side, length in zip(zip(*pairs, strict=True), (n_queries, n_keys), strict=True)
    ]
    group = heads // inputs.key.shape[1]
    key, value = (y.repeat_interleave(group, dim=1) for y in (inputs.key, inputs.value))
    wide = inputs._replace(
        query=F.pad(torch.cat([inputs.query, columns[0]], dim=-1), (0, padding)),
        key=F.pad(torch.cat([key, columns[1]], dim=-1), (0, padding)),
        value=F.pad(value, (0, len(pairs) + padding)),
    )
    return softmax_attention(wide, dropout, scale=width**-0.5)[..., :width]
