"""1.5-entmax in place of softmax (Peters et al. 2019, Correia et al. 2019): weights that reach exactly 0."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tra.attention.shared.row_blocks import DenseAttention
from tra.ops.compiler_workarounds import entmax_weights, halved_below_zero, is_exporting
from tra.ops.forward_mode import refuse_forward_mode

MAX_LENGTH_BITS = 24
"""Bits of the largest number of keys that an exported graph takes."""


class EntmaxAttention(DenseAttention):
    """Rotated attention, normalised by 1.5-entmax. See `Attention`.

    The papers define a normaliser and no positions. Positions are those of `rope`, so that only the normaliser differs.
    """

    default_rotary: ClassVar[bool] = True

    def weigh(self, logits: Tensor) -> Tensor:
        return entmax15(logits)


def entmax15(logits: Tensor) -> Tensor:
    """Return p_j = max(0, x_j / 2 - τ)², with τ such that they sum to 1, over the last dimension. -inf has weight 0.

    Σ max(0, x / 2 - τ)² is convex and falls in τ, so Newton's method from the left of the root approaches it without
    overshooting: far from it a step halves the distance, near it a step squares the error.
    """
    refuse_forward_mode("1.5-entmax")
    x = halved_below_zero(logits)
    # At the start the root is within √n. An exported graph takes any n, so it has the steps of the largest n.
    steps = 8 + (MAX_LENGTH_BITS if is_exporting() else max(1, logits.shape[-1]).bit_length()) // 2
    with torch.no_grad():
        threshold = torch.full_like(x[..., :1], -1.0)
        for _ in range(steps if x.dtype != torch.float64 else steps + 2):
            above = (x - threshold).clamp(min=0)
            threshold = threshold + (above.square().sum(-1, keepdim=True) - 1) / (2 * above.sum(-1, keepdim=True))
    return entmax_weights(x, threshold)
