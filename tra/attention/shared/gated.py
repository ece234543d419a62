"""Mechanisms with a forget gate and no kernel of their own: each call takes the fastest exact way to compute it."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from tra.attention.shared.bias_columns import biased_softmax_attention, can_use_bias_columns
from tra.attention.shared.flex import ScoreFunction, can_use_flex, flex_softmax_attention
from tra.attention.shared.forget_gate import ForgetGate
from tra.attention.shared.inputs import AttentionInputs
from tra.attention.shared.row_blocks import DenseAttention


class BiasFactors(NamedTuple):
    """A bias a_i · b_j on the logits."""

    query_factor: Tensor | None  # a, [B or 1, H, Tq]; None is 1
    key_factor: Tensor  # b, [B or 1, H or 1, Tk]


class GatedAttention(DenseAttention):
    """Bias columns without gradients, FlexAttention when compiled on a GPU, blocks of rows otherwise.

    A mechanism defines `logits`, the same as a `logit_function`, and `bias_factors` where its bias has them.

    Args:
        gate_bias: Initial bias of the forget gate σ(w · x + b).
        options: See `Attention`.
    """

    config_fields: ClassVar[tuple[str, ...]] = ("gate_bias",)

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int | None = None, *, gate_bias: float = 0.0, **options: Any
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        self.gate = ForgetGate(d_model, n_heads, gate_bias, fused=self.fuse_projections)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        factors = self.bias_factors(inputs) if can_use_bias_columns(inputs) else None
        if factors is not None:
            return biased_softmax_attention(inputs, *factors, self.dropout_now)
        if can_use_flex(inputs, self.dropout_now):
            return flex_softmax_attention(inputs, self.logit_function(inputs))
        return super().attend(inputs)

    def bias_factors(self, inputs: AttentionInputs) -> BiasFactors | None:
        """Return the factors of the bias, or None if it has none."""
        return None

    def logit_function(self, inputs: AttentionInputs) -> ScoreFunction:
        """Return `logits` as a function for FlexAttention."""
        raise NotImplementedError
