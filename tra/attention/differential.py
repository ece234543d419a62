"""Differential attention (Ye et al. 2024): the difference of two softmax maps, so that noise common to both cancels."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention.shared.base import Attention, WeightMap
from tra.attention.shared.inputs import AttentionInputs, softmax_attention


class DifferentialAttention(Attention):
    """`(softmax(q¹ k¹ᵀ) - λ softmax(q² k²ᵀ)) v`, heads in pairs with a value of twice the width, then a norm.

    As published: rotated, λ learnt per layer around an initial value that grows with depth, and the heads' outputs
    RMS-normalised and multiplied by 1 - λ_init. With as many projections as the others it has half the heads.

    Args:
        layer: Number of the layer, from 0.
        options: See `Attention`; `n_heads` and `n_kv_heads` must be even.
    """

    default_rotary: ClassVar[bool] = True
    orders_by_content: ClassVar[bool] = False
    config_fields: ClassVar[tuple[str, ...]] = ("layer",)

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int | None = None, *, layer: int = 0, **options: Any
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        if self.n_heads % 2 or self.n_kv_heads % 2:
            raise ValueError(
                f"differential attention pairs its heads: n_heads and n_kv_heads must be even, "
                f"got {self.n_heads} and {self.n_kv_heads}"
            )
        self.initial = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambdas = nn.Parameter(0.1 * torch.randn(4, self.head_width))  # q1, k1, q2, k2
        self.norm = nn.RMSNorm(2 * self.head_width, eps=1e-5)

    def strength(self) -> Tensor:
        """Return λ, in float32 at least."""
        lambdas = self.lambdas if self.lambdas.dtype == torch.float64 else self.lambdas.float()
        first_query, first_key, second_query, second_key = lambdas
        return (first_query * first_key).sum().exp() - (second_query * second_key).sum().exp() + self.initial

    def pair_heads(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return inputs with keys `[B, H, T, D]` and values `[B, H, T, 2 D]` for every query head.

        Query heads that share keys and values share pairs of them.
        """
        group = self.n_heads // self.n_kv_heads
        key = inputs.key.unflatten(1, (-1, 2)).repeat_interleave(group, dim=1).flatten(1, 2)
        value = torch.cat([inputs.value[:, ::2], inputs.value[:, 1::2]], dim=-1).repeat_interleave(2 * group, dim=1)
        return inputs._replace(key=key, value=value)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        inputs = self.pair_heads(inputs)
        if self.dropout_now == 0:
            # Fused kernels need keys and values of one width, so each half of the values has its own heads.
            halves = inputs._replace(
                query=inputs.query.repeat(1, 2, 1, 1),
                key=inputs.key.repeat(1, 2, 1, 1),
                value=torch.cat(inputs.value.chunk(2, dim=-1), dim=1),
            )
            read = torch.cat(softmax_attention(halves, 0.0).chunk(2, dim=1), dim=-1)  # [B, H, T, 2 D]
        else:  # both halves must drop the same weights
            read = softmax_attention(inputs, self.dropout_now)
        return self._norm_difference(read[:, ::2] - self.strength() * read[:, 1::2], read.dtype)

    def _norm_difference(self, difference: Tensor, dtype: torch.dtype) -> Tensor:
        return self.norm(difference.to(self.norm.weight.dtype)).to(dtype) * (1 - self.initial)

    def attend_with_map(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """See `Attention`. The map is that of pairs of heads, as in `attention_map`."""
        with torch.autocast(inputs.x.device.type, enabled=False):
            both = self.weigh(self.logits(inputs, torch.arange(inputs.query.shape[2], device=inputs.x.device)))
            weights = both[:, ::2] - self.strength() * both[:, 1::2]
            value = self.pair_heads(inputs).value[:, ::2]
            read = F.dropout(weights, self.dropout_now).to(value.dtype) @ value
            return self._norm_difference(read, read.dtype), weights

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        return super().logits(self.pair_heads(inputs), rows)

    @torch.no_grad()
    def attention_map(self, x: Tensor, key_mask: Tensor | None = None, rows: Tensor | None = None) -> WeightMap:
        """Return the map of pairs of heads.

        Content is that of a pair's first head; weights, which may be negative, stand in for logits.
        """
        both = super().attention_map(x, key_mask, rows)
        weights = both.weights[:, ::2] - self.strength() * both.weights[:, 1::2]
        hidden = both.logits[:, ::2] == -torch.inf
        return WeightMap(weights, both.content[:, ::2], weights.masked_fill(hidden, -torch.inf))

    def content(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        return super().content(self.pair_heads(inputs), rows)
