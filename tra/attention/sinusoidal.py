"""Sinusoidal positions (Vaswani et al. 2017), added to the input embeddings."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tra.attention.nope import NoPositionAttention


class SinusoidalAttention(NoPositionAttention):
    """Plain softmax attention over embeddings that carry their place. See `Attention`.

    As published, embeddings, which start at N(0, 1/√d_model), are multiplied by √d_model, and positions of amplitude 1
    are added.
    """

    marks_input: ClassVar[bool] = True
    orders_by_content: ClassVar[bool] = False

    @staticmethod
    def mark_input(x: Tensor, place: Tensor) -> Tensor:
        return x * x.shape[-1] ** 0.5 + sinusoids(place, x.shape[-1], x.dtype)


def sinusoids(place: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """`[B, T]` -> `[B, T, width]`: sin and cos of place / 10000^(2i / width), alternating."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    even = torch.arange(0, width, 2, device=place.device, dtype=exact)
    angle = place[..., None].to(exact) * 10_000 ** (-even / width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., :width].to(dtype)
