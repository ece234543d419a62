"""Rotation of queries and keys by their place (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_by_place(x: Tensor, place: Tensor, theta: float) -> Tensor:
    """Rotate the pairs (x_i, x_{i + width/2}) of `[B, H, T, width]`, whose tokens stand at `place` `[B or 1, T]`."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return rotate(x, angles(place, x.shape[-1], theta, dtype))


def angles(place: Tensor, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    """`[B, T]` -> `[B, 1, T, width / 2]`, in float32 at least: bf16 can't tell far positions apart."""
    frequency = theta ** (-torch.arange(0, width, 2, device=place.device, dtype=dtype) / width)
    return place[:, None, :, None].to(dtype) * frequency


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.to(angle.dtype).chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
