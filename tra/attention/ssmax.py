"""Scalable softmax (Nakanishi 2025): logits grow with the logarithm of the number of keys, so attention never fades."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tra.attention.shared.base import Attention, Given, key_places, softmax_attention

INITIAL = 0.168
"""As published: the inverse of the mean of log n over the author's training length of 1,024."""


class ScalableSoftmaxAttention(Attention):
    """Softmax over `s_h · log n · q_i · k_j / √D` with n keys in sight and s learnt; rotated. See `Attention`."""

    default_rotary: ClassVar[bool] = True

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int | None = None, **options: Any) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        self.strength = nn.Parameter(torch.full((n_heads,), INITIAL))

    def attend(self, given: Given) -> Tensor:
        return softmax_attention(self._sharpened(given), self.dropout_now)

    def logits(self, given: Given, rows: Tensor) -> Tensor:
        return super().logits(self._sharpened(given), rows)

    def _sharpened(self, given: Given) -> Given:
        dtype = torch.float64 if given.query.dtype == torch.float64 else torch.float32
        in_sight = 1 + key_places(given)[:, None, given.past :, None]
        factor = self.strength[:, None, None].to(dtype) * in_sight.to(dtype).log()  # [B, H, Tq, 1]
        return given._replace(query=(given.query * factor).to(given.query.dtype))
