"""Scalable softmax (Nakanishi 2025): logits grow with log n for n keys, so attention doesn't flatten with length."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tra.attention.shared.base import Attention
from tra.attention.shared.inputs import AttentionInputs, key_positions, softmax_attention

INITIAL_STRENGTH = 0.168
"""As published: the inverse of the mean of log n over the author's training length of 1,024."""


class ScalableSoftmaxAttention(Attention):
    """Softmax over `s_h · log n · q_i · k_j / √D` with n visible keys and s learnt; rotated. See `Attention`."""

    default_rotary: ClassVar[bool] = True

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int | None = None, **options: Any) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        self.strength = nn.Parameter(torch.full((n_heads,), INITIAL_STRENGTH))

    def attend(self, inputs: AttentionInputs) -> Tensor:
        return softmax_attention(self._scaled(inputs), self.dropout_now)

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        return super().logits(self._scaled(inputs), rows)

    def _scaled(self, inputs: AttentionInputs) -> AttentionInputs:
        dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
        n_visible = 1 + key_positions(inputs)[:, None, inputs.past :, None]
        factor = self.strength[:, None, None].to(dtype) * n_visible.to(dtype).log()  # [B, H, Tq, 1]
        return inputs._replace(query=(inputs.query * factor).to(inputs.query.dtype))
