"""Sinusoidal positions (Vaswani et al. 2017), added to the input embeddings."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tra.attention.nope import NoPositionAttention


class SinusoidalAttention(NoPositionAttention):
    """Plain softmax attention over embeddings to which positions are added. See `Attention`.

    As published, embeddings, which start at N(0, 1/√d_model), are multiplied by √d_model, and positions of amplitude 1
    are added.
    """

    marks_input: ClassVar[bool] = True
    orders_by_content: ClassVar[bool] = False

    @staticmethod
    def mark_input(x: Tensor, position: Tensor) -> Tensor:
        return x * x.shape[-1] ** 0.5 + sinusoids(position, x.shape[-1], x.dtype)


def sinusoids(position: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return `[B, T]` -> `[B, T, width]`: sin and cos of position / 10000^(2i / width), alternating."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    even = torch.arange(0, width, 2, device=position.device, dtype=wide)
    angle = position[..., None].to(wide) * 10_000 ** (-even / width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., :width].to(dtype)
