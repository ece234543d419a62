"""Running sums from the right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("tra::sum_from_the_right", mutates_args=())
def sum_from_the_right(x: Tensor) -> Tensor:
    """Of `[..., n]`: the sum of each entry and all after it.

    An operator, so that a compiler doesn't fuse it with what reads it in another order, see `tra.ops.softmax`.
    """
    return x.flip(-1).cumsum(-1).flip(-1)


@sum_from_the_right.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("tra::sum_from_the_left", mutates_args=())
def _sum_from_the_left(x: Tensor) -> Tensor:
    return x.cumsum(-1)


@_sum_from_the_left.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(_context: Any, gradient: Tensor) -> Tensor:
    return _sum_from_the_left(gradient)


sum_from_the_right.register_autograd(_backward)
