"""TRA with the threshold, but a distance that counts all keys, also those that left."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tra.attention._base import Given, scores, seen, softmax_or_nothing
from tra.attention._dense import DenseAttention
from tra.attention._gate import ForgetGate
from tra.attention.tra_distance_only import distances

FLEX_MULTIPLE = 128
"""FlexAttention with a score function has given NaN gradients at other lengths (pytorch issue 153799)."""


class PlainDistanceAttention(DenseAttention):
    """Softmax over `q_i · k_j / √D + δ_i (i - j + 1)`, over keys above the threshold; a row may keep nothing.

    Args:
        gate_bias: Initial bias of the forget gate δ = log σ(w · x + b).
        threshold: A key stays when its scaled score is above it.
        options: See `Attention`; queries and keys are normalised by default, as in TRA.
    """

    default_qk_norm: ClassVar[bool] = True
    config_fields: ClassVar[tuple[str, ...]] = ("gate_bias",)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        gate_bias: float = 0.0,
        threshold: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        self.threshold = threshold
        self.gate = ForgetGate(d_model, n_heads, gate_bias)

    def attend(self, given: Given) -> Tensor:
        plain = given.key_mask is None and given.document_ids is None and given.cache is None
        fits = given.query.is_cuda and given.query.shape[2] % FLEX_MULTIPLE == 0 and self.dropout_now == 0
        if plain and fits and torch.compiler.is_compiling():
            return flex_plain_distance(given, self.gate(given.x), self.threshold)
        return super().attend(given)

    def logits(self, given: Given, rows: Tensor) -> Tensor:
        content = scores(given, rows)
        kept = seen(given, rows) & (content > self.threshold)
        biased = content + self.gate(given.x)[:, :, rows, None] * distances(given, rows)
        return torch.where(kept, biased, -torch.inf)

    def weigh(self, logits: Tensor) -> Tensor:
        return softmax_or_nothing(logits)


def flex_plain_distance(given: Given, log_forget: Tensor, threshold: float) -> Tensor:
    """The same on FlexAttention, which is fused where it is compiled."""
    length = given.query.shape[2]

    def score(content: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        bias = log_forget[batch, head, query] * (query - key + 1)
        return torch.where(content > threshold, content + bias, -torch.inf)

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, length, length, device=given.query.device.type)
    out = flex_attention(given.query, given.key, given.value, score, mask, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out
