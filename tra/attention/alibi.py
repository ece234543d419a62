"""Attention with linear biases (Press et al. 2022): each head takes off its own slope times the distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tra.attention._base import Attention, Given, key_places
from tra.attention._columns import biased_softmax_attention


class LinearBiasAttention(Attention):
    """Softmax attention over `q_i · k_j / √D - m_h (i - j)`. See `Attention`."""

    def attend(self, given: Given) -> Tensor:
        slope, place = self._factors(given)
        return biased_softmax_attention(given, slope, place, self.dropout_now)

    def logits(self, given: Given, rows: Tensor) -> Tensor:
        slope, place = self._factors(given)
        distance = place[:, :, given.past + rows, None] - place[:, :, None]  # [B, 1, R, Tk]
        return super().logits(given, rows) - slope[..., None] * distance

    def _factors(self, given: Given) -> tuple[Tensor, Tensor]:
        """Slopes `[1, H, 1]` and places `[B, 1, Tk]`."""
        dtype = torch.float64 if given.query.dtype == torch.float64 else torch.float32
        slope = torch.tensor(slopes(self.n_heads), dtype=dtype, device=given.query.device)[None, :, None]
        return slope, key_places(given)[:, None].to(dtype)


def slopes(n_heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), … for n a power of two; others take every second of the next power's, as published."""
    power = 2 ** math.floor(math.log2(n_heads))
    first = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return first if power == n_heads else first + slopes(2 * power)[::2][: n_heads - power]
