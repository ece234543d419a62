"""Attention with linear biases (Press et al. 2022): each head takes off its own slope times the distance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tra.attention.shared.base import Given, key_places
from tra.attention.shared.bias_columns import biased_softmax_attention
from tra.attention.shared.row_blocks import DenseAttention


class LinearBiasAttention(DenseAttention):
    """Softmax attention over `q_i · k_j / √D - m_h (i - j)`. See `Attention`."""

    slopes: Tensor

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int | None = None, **options: Any) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        self.register_buffer("slopes", torch.tensor(slopes(n_heads))[None, :, None], persistent=False)

    def attend(self, given: Given) -> Tensor:
        if given.query.dtype == torch.float16:  # whose range far places exceed
            return super().attend(given)
        place = key_places(given)[:, None].to(_exact(given))
        return biased_softmax_attention(given, self.slopes.to(place.dtype), place, self.dropout_now)

    def logits(self, given: Given, rows: Tensor) -> Tensor:
        place = key_places(given)[:, None]
        distance = place[:, :, given.past + rows, None] - place[:, :, None]  # [B, 1, R, Tk]
        return super().logits(given, rows) - self.slopes[..., None].to(_exact(given)) * distance


def _exact(given: Given) -> torch.dtype:
    return torch.float64 if given.query.dtype == torch.float64 else torch.float32


def slopes(n_heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), … for n a power of two; others take every second of the next power's, as published."""
    power = 2 ** math.floor(math.log2(n_heads))
    first = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return first if power == n_heads else first + slopes(2 * power)[::2][: n_heads - power]
