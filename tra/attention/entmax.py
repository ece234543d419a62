"""1.5-entmax in place of softmax (Peters et al. 2019, Correia et al. 2019): weights that reach exactly 0."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from tra.attention.shared.row_blocks import DenseAttention


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
    x = _halved_below_zero(logits)
    steps = 8 + max(1, logits.shape[-1]).bit_length() // 2  # at the start the root is within √n
    with torch.no_grad():
        threshold = torch.full_like(x[..., :1], -1.0)
        for _ in range(steps if x.dtype != torch.float64 else steps + 2):
            above = (x - threshold).clamp(min=0)
            threshold = threshold + (above.square().sum(-1, keepdim=True) - 1) / (2 * above.sum(-1, keepdim=True))
    return _weights(x, threshold)


# Operators, because a compiler would store values in one loop over a row and read them back in the next.


@torch.library.custom_op("tra::halved_below_zero", mutates_args=())
def _halved_below_zero(logits: Tensor) -> Tensor:
    x = logits / 2
    return x.sub_(x.amax(-1, keepdim=True))


@_halved_below_zero.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_halved_below_zero.register_autograd(lambda _context, gradient: gradient / 2)  # a shift doesn't change the weights


@torch.library.custom_op("tra::entmax_weights", mutates_args=())
def _weights(x: Tensor, threshold: Tensor) -> Tensor:
    return (x - threshold).clamp_(min=0).square_()


@_weights.register_fake
def _(x: Tensor, threshold: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("tra::entmax_backward", mutates_args=())
def _weights_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    root = weights.sqrt()  # dp_j / dx_j = 2 √p_j; τ moves by the mean of dx, weighted with √p
    mean = (gradient * root).sum(-1, keepdim=True) / root.sum(-1, keepdim=True)
    return (gradient - mean).mul_(root).mul_(2)


@_weights_backward.register_fake
def _(gradient: Tensor, weights: Tensor) -> Tensor:
    return torch.empty_like(weights, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (weights,) = context.saved_tensors
    return _weights_backward(gradient, weights), None


_weights.register_autograd(_backward, setup_context=_setup)
