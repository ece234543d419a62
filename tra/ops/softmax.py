"""Softmax over kept keys, as an operator.

Left to a compiler, it becomes a loop over a row that stores its logits and another that reads them back, and Inductor
puts no barrier between the two, so that other threads' stores may be missed (pytorch PR 190519 adds it). With torch
2.11 on an H200 compiled weights came out wrong at some lengths, in float32 as in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("tra::softmax_or_nothing", mutates_args=())
def softmax_or_nothing(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, in which a row of -inf throughout is 0."""
    nothing = logits.amax(-1, keepdim=True) == -torch.inf
    return logits.softmax(-1).masked_fill_(nothing, 0.0)


@softmax_or_nothing.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("tra::softmax_backward", mutates_args=())
def _softmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(gradient, weights, -1, weights.dtype)


@_softmax_backward.register_fake
def _(gradient: Tensor, weights: Tensor) -> Tensor:
    return torch.empty_like(weights, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(context: Any, gradient: Tensor) -> Tensor:
    (weights,) = context.saved_tensors
    return _softmax_backward(gradient.contiguous(), weights)


softmax_or_nothing.register_autograd(_backward, setup_context=_setup)
