"""Rotation of queries and keys by their place (Su et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotate_by_place(tensors: Sequence[Tensor], place: Tensor, theta: float) -> list[Tensor]:
    """Rotate the pairs (x_i, x_{i + width/2}) of `[B, H, T, width]`, whose tokens stand at `place` `[B or 1, T]`.

    The result has the heads of a token side by side in memory, as projections leave them and take them.
    """
    first = tensors[0]
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    cos_sin = rotations(place, first.shape[-1], theta, dtype)
    return [rotate(x.transpose(1, 2), cos_sin).transpose(1, 2) for x in tensors]


@torch.library.custom_op("tra::rotations", mutates_args=())
def rotations(place: Tensor, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines, `[B, T]` -> `[2, B, T, 1, width / 2]`, in float32 at least: bf16 can't tell far places apart.

    An operator, so that a compiler keeps the table instead of working out sines again for every head and sequence.
    """
    frequency = theta ** (-torch.arange(0, width, 2, device=place.device, dtype=dtype) / width)
    angle = place[..., None, None].to(dtype) * frequency
    return torch.stack([angle.cos(), angle.sin()])


@rotations.register_fake
def _(place: Tensor, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    batch, length = place.shape
    return place.new_empty(2, batch, length, 1, width // 2, dtype=dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """`[B, T, H, width]` by a table of `rotations`."""
    first, second = x.to(cos_sin.dtype).chunk(2, dim=-1)
    cos, sin = cos_sin
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
