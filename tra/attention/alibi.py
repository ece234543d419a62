"""Attention with linear biases (Press et al. 2022): each head subtracts its own slope times the distance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tra.attention.shared.bias_columns import biased_softmax_attention
from tra.attention.shared.inputs import AttentionInputs, key_positions
from tra.attention.shared.row_blocks import DenseAttention
from tra.ops.compiler_workarounds import is_exporting


class LinearBiasAttention(DenseAttention):
    """Softmax attention over `q_i · k_j / √D - m_h (i - j)`. See `Attention`."""

    slopes: Tensor

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int | None = None, **options: Any) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        self.register_buffer("slopes", torch.tensor(slopes(n_heads))[None, :, None], persistent=False)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        # Far positions exceed the range of float16, and other runtimes have no integers of the same bits.
        if inputs.query.dtype == torch.float16 or is_exporting():
            return super().attend(inputs)
        position = key_positions(inputs)[:, None].to(_wide_dtype(inputs))
        return biased_softmax_attention(inputs, self.slopes.to(position.dtype), position, self.dropout_now)

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        position = key_positions(inputs)[:, None]
        distance = position[:, :, inputs.past + rows, None] - position[:, :, None]  # [B, 1, R, Tk]
        return super().logits(inputs, rows) - self.slopes[..., None].to(_wide_dtype(inputs)) * distance


def _wide_dtype(inputs: AttentionInputs) -> torch.dtype:
    return torch.float64 if inputs.query.dtype == torch.float64 else torch.float32


def slopes(n_heads: int) -> list[float]:
    """Return 2^(-8/n), 2^(-16/n), … for n a power of two; others add every second of the next power, as published."""
    power = 2 ** math.floor(math.log2(n_heads))
    first = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return first if power == n_heads else first + slopes(2 * power)[::2][: n_heads - power]
