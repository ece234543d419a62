"""Mechanisms with a forget gate and no kernel of their own: the fastest form that is exact takes each call."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from tra.attention.shared.base import Given
from tra.attention.shared.bias_columns import biased_softmax_attention, columns_fit
from tra.attention.shared.flex import ScoreFunction, flex_fits, flex_softmax_attention
from tra.attention.shared.forget_gate import ForgetGate
from tra.attention.shared.row_blocks import DenseAttention


class Factors(NamedTuple):
    """A bias a_i · b_j on the logits."""

    of_query: Tensor | None  # a, [B or 1, H, Tq]; None is 1
    of_key: Tensor  # b, [B or 1, H or 1, Tk]


class GatedAttention(DenseAttention):
    """Columns without gradients, FlexAttention when compiled on a GPU, blocks of rows otherwise.

    A mechanism gives `logits`, the same as a `logit_function`, and `factors` where its bias has them.

    Args:
        gate_bias: Initial bias of the forget gate σ(w · x + b).
        options: See `Attention`.
    """

    config_fields: ClassVar[tuple[str, ...]] = ("gate_bias",)

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int | None = None, *, gate_bias: float = 0.0, **options: Any
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        self.gate = ForgetGate(d_model, n_heads, gate_bias)

    def attend(self, given: Given) -> Tensor:
        factors = self.factors(given) if columns_fit(given) else None
        if factors is not None:
            return biased_softmax_attention(given, *factors, self.dropout_now)
        if flex_fits(given, self.dropout_now):
            return flex_softmax_attention(given, self.logit_function(given))
        return super().attend(given)

    def factors(self, given: Given) -> Factors | None:
        return None

    def logit_function(self, given: Given) -> ScoreFunction:
        """`logits`, in the words of FlexAttention."""
        raise NotImplementedError
