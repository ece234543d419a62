"""A bias a_i · b_j on the logits, as further columns of queries and keys: plain softmax attention then adds it.

Every mechanism whose bias factors like this runs on the fused kernels of `scaled_dot_product_attention`, with memory
linear in length. A term that depends on the query alone falls out of the softmax: `m (j - i)` is `m · j`, and a sum of
gates from j to i is minus the running sum at j.

The columns go through bfloat16 (and TF32) unharmed: a factor is split into pieces of 8 significant bits, each of
which is exact there, and products are summed in float32.

Gradients of the factors are another matter: they are sums over all keys that should nearly cancel, but whose rounding
errors don't (in bfloat16, at length 1024, 9 % off for FoT's gates, 150 % for a gate times the distance). So a learnt
factor takes this path without gradients only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention.shared.base import Given, softmax_attention
from tra.ops.compiler_workarounds import truncate_to_bfloat16

PIECES = 3
"""24 bits in pieces of 8."""


def columns_fit(given: Given) -> bool:
    """Whether a mechanism with learnt factors may go this way. Large factors are beyond float16's range."""
    return not torch.is_grad_enabled() and given.query.dtype != torch.float16


def split(x: Tensor, pieces: int = PIECES) -> list[Tensor]:
    """Return pieces that add up to x, each exact in bfloat16: the upper bits of x, then of what is left."""
    parts, rest = [], x.float()
    for _ in range(pieces):
        part = truncate_to_bfloat16(rest)
        parts.append(part)
        rest = rest - part
    return parts


def biased_softmax_attention(given: Given, of_query: Tensor | None, of_key: Tensor, dropout: float = 0.0) -> Tensor:
    """Softmax attention over `q_i · k_j / √D + a_i b_j`.

    Args:
        of_query: a, `[B or 1, H, Tq or 1]`, float32 (float64 with float64 queries), without gradients; None is 1.
        of_key: b, `[B or 1, H or 1, Tk]`, the same.
    """
    batch, heads, n_queries, width = given.query.shape
    n_keys = given.key.shape[2]
    of_key = of_key - of_key[..., -1:]  # softmax doesn't see it, and near the last queries it keeps numbers small
    # The kernel's scale multiplies the columns too. Where only b is there, b takes what undoes it.
    if of_query is None:
        of_key = of_key * width**0.5
        of_query = torch.ones(1, 1, 1, dtype=of_key.dtype, device=of_key.device)
        pairs = [(of_query, part) for part in ([of_key] if of_key.dtype == torch.float64 else split(of_key))]
    elif of_key.dtype == torch.float64:
        pairs = [(of_query * width**0.5, of_key)]
    else:  # products of pieces below 2^-22 of the whole are left out
        left, right = split(of_query * width**0.5), split(of_key)
        pairs = [(a, b) for i, a in enumerate(left) for j, b in enumerate(right) if i + j < PIECES]
    padding = -(width + len(pairs)) % 8  # fused kernels want widths in eights
    columns = [
        torch.stack([part.expand(batch, heads, length) for part in side], dim=-1).to(given.query.dtype)
        for side, length in zip(zip(*pairs, strict=True), (n_queries, n_keys), strict=True)
    ]
    group = heads // given.key.shape[1]
    key, value = (y.repeat_interleave(group, dim=1) for y in (given.key, given.value))
    wide = given._replace(
        query=F.pad(torch.cat([given.query, columns[0]], dim=-1), (0, padding)),
        key=F.pad(torch.cat([key, columns[1]], dim=-1), (0, padding)),
        value=F.pad(value, (0, len(pairs) + padding)),
    )
    return softmax_attention(wide, dropout, scale=width**-0.5)[..., :width]
