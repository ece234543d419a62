"""Rotation of queries and keys by their position (Su et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tra.ops.compiler_workarounds import decomposable


def rotate_by_position(tensors: Sequence[Tensor], position: Tensor, theta: float) -> list[Tensor]:
    """Rotate the pairs (x_i, x_{i + width/2}) of `[B, H, T, width]` by the tokens' `position` `[B or 1, T]`.

    The result has the heads of a token side by side in memory, as projections write and read them.
    """
    first = tensors[0]
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    cos_sin = rotations(position, first.shape[-1], theta, dtype)
    return [rotate(x.transpose(1, 2), cos_sin).transpose(1, 2) for x in tensors]


@decomposable
@torch.library.custom_op("tra::rotations", mutates_args=())
def rotations(position: Tensor, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines, `[B, T]` -> `[2, B, T, 1, width / 2]`.

    In float32 at least: bf16 can't tell far positions apart. An operator, so that a compiler keeps the table instead
    of computing sines again for every head and sequence.
    """
    frequency = theta ** (-torch.arange(0, width, 2, device=position.device, dtype=dtype) / width)
    angle = position[..., None, None].to(dtype) * frequency
    return torch.stack([angle.cos(), angle.sin()])


@rotations.operator.register_fake
def _(position: Tensor, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    batch, length = position.shape
    return position.new_empty(2, batch, length, 1, width // 2, dtype=dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate `[B, T, H, width]` by a table of `rotations`."""
    first, second = x.to(cos_sin.dtype).chunk(2, dim=-1)
    cos, sin = cos_sin
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
