"""Workarounds for bugs of compilers. Each entry names the bug and the versions that have it.

`tests/ops/test_workarounds_gpu.py` runs the plain form of each on a GPU, and fails with "the workaround can go" once
the plain form is right.

1. **Inductor reads rows back without a barrier** (torch 2.11 on an H200; pytorch PR 190519 adds it). If one loop stores
a row and the next reads it in another order, it may miss stores of other threads. Compiled weights were wrong at some
lengths, in float32 and in bfloat16. The operators below aren't fused with the code that reads their results:
`softmax_or_nothing`, `sum_from_the_right`, `count_from_the_right`, `halved_below_zero`, `entmax_weights`.

2. **Inductor leaves out a cast to bfloat16 and back** (all versions so far, unless
`torch._inductor.config.emulate_precision_casts` is set): `truncate_to_bfloat16` works on the bits.

3. **Inductor computes on bare indices in int32** (torch 2.11), so that products that need 64 bits overflow.
`tra.ops.dropout` adds the seed, a tensor of int64, before it multiplies.

4. **FlexAttention's gradients are NaN** with a score function at some lengths (pytorch issue 153799):
`FLEX_LENGTH_MULTIPLE`.

5. **ptxas 12.8.93 loses an address** (Triton 3.6 brings it; 12.9 is right): `MAX_STRIDE_UNIT`.

6. **Dynamo treats `torch.compiler.is_exporting()` as true in any compiled graph** (torch 2.11; 2.13 is right):
`is_exporting` reads the flag instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tra.ops.forward_mode import in_forward_mode

FLEX_LENGTH_MULTIPLE = 128
"""FlexAttention is used at lengths that are a multiple of this."""

MAX_STRIDE_UNIT = 8
"""The decode kernels get strides of keys and values in half precision in units of this many numbers, or of the largest
divisor of it that divides them all.

Rows of 24 numbers are not a multiple of 16, which is all that Triton finds out by itself, so it copied keys through
registers, number by number, and products of 64 such keys were wrong on an H200. The PTX is right; by its SASS, ptxas
12.8.93 loses the address of a buffer that such keys share with what comes after them. Two numbers, four bytes, are the
least that can be copied asynchronously, into buffers of their own.
"""

MAX_EXACT_HALF = 2048
"""Up to here float16 holds every whole number."""


def is_exporting() -> bool:
    """Return whether a graph is being exported, not just compiled."""
    return torch.compiler._is_exporting_flag


def truncate_to_bfloat16(x: Tensor) -> Tensor:
    """Return the upper half of a float32's bits, as float32."""
    return (x.view(torch.int32) & -65536).view(torch.float32)


def count_from_the_right(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how many of `[..., n]` bool are True from each place up to the end of its row, in `dtype`.

    On a GPU, as far as a half holds the counts, it is a product with a triangle of ones: exact, fast, and not fused.
    """
    length = kept.shape[-1]
    if not kept.is_cuda or length > MAX_EXACT_HALF:
        return sum_from_the_right(kept.to(dtype))
    triangle = torch.ones(length, length, dtype=torch.float16, device=kept.device).tril()
    return (kept.to(torch.float16) @ triangle).to(dtype)


def _like_first(x: Tensor, *_: Tensor) -> Tensor:
    """Stand in for an operator whose result has the shape of its first argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_second(_: Tensor, x: Tensor) -> Tensor:
    return _like_first(x)


def decomposable(operator: Any) -> Any:
    """Return a function that calls a custom operator or, where that has no meaning, what the operator is made of.

    That is in graphs that are exported, as other runtimes don't know operators of ours, and in forward mode, where
    their derivative would be 0. The operator itself is the function's attribute `operator`.
    """

    @functools.wraps(operator._init_fn)
    def call(*arguments: Any) -> Tensor:
        plain = is_exporting() or in_forward_mode()
        function: Callable[..., Tensor] = operator._init_fn if plain else operator
        return function(*arguments)

    vars(call)["operator"] = operator
    return call


@decomposable
@torch.library.custom_op("tra::sum_from_the_right", mutates_args=())
def sum_from_the_right(x: Tensor) -> Tensor:
    """Return the sum of each entry of `[..., n]` and all after it."""
    return x.flip(-1).cumsum(-1).flip(-1)


@torch.library.custom_op("tra::sum_from_the_left", mutates_args=())
def _sum_from_the_left(x: Tensor) -> Tensor:
    return x.cumsum(-1)


@decomposable
@torch.library.custom_op("tra::softmax_or_nothing", mutates_args=())
def softmax_or_nothing(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension, in which a row of -inf throughout is 0."""
    nothing = logits.amax(-1, keepdim=True) == -torch.inf
    return logits.softmax(-1).masked_fill(nothing, 0.0)


@torch.library.custom_op("tra::softmax_backward", mutates_args=())
def _softmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(gradient, weights, -1, weights.dtype)


@decomposable
@torch.library.custom_op("tra::halved_below_zero", mutates_args=())
def halved_below_zero(logits: Tensor) -> Tensor:
    """Return half of the logits, less the largest half of their row. Its gradient leaves out the shift."""
    x = logits / 2
    return x - x.amax(-1, keepdim=True)


@decomposable
@torch.library.custom_op("tra::entmax_weights", mutates_args=())
def entmax_weights(x: Tensor, threshold: Tensor) -> Tensor:
    """Return max(0, x - threshold)². Its gradient is that of 1.5-entmax, whose threshold depends on x."""
    return (x - threshold).clamp(min=0).square()


@torch.library.custom_op("tra::entmax_backward", mutates_args=())
def _entmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    root = weights.sqrt()  # dp_j / dx_j = 2 √p_j; τ moves by the mean of dx, weighted with √p
    mean = (gradient * root).sum(-1, keepdim=True) / root.sum(-1, keepdim=True)
    return (gradient - mean).mul_(root).mul_(2)


def _save_output(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


for _function in (sum_from_the_right, softmax_or_nothing, halved_below_zero, entmax_weights):
    _function.operator.register_fake(_like_first)
_sum_from_the_left.register_fake(_like_first)
for _operator in (_softmax_backward, _entmax_backward):
    _operator.register_fake(_like_second)
sum_from_the_right.operator.register_autograd(lambda _, gradient: _sum_from_the_left(gradient))
softmax_or_nothing.operator.register_autograd(
    lambda ctx, gradient: _softmax_backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=_save_output
)
halved_below_zero.operator.register_autograd(lambda _, gradient: gradient / 2)
entmax_weights.operator.register_autograd(
    lambda ctx, gradient: (_entmax_backward(gradient, *ctx.saved_tensors), None), setup_context=_save_output
)
