"""TRA's second half without the first: no threshold, so distance is plain, times the gate of the query."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from tra.attention._base import Given, key_places, seen
from tra.attention._columns import biased_softmax_attention, columns_fit
from tra.attention._dense import DenseAttention
from tra.attention._flex import ScoreFunction, flex_fits, flex_softmax_attention
from tra.attention._gate import ForgetGate


class DistanceOnlyAttention(DenseAttention):
    """Softmax over `q_i · k_j / √D + δ_i (i - j + 1)`.

    Args:
        gate_bias: Initial bias of the forget gate δ = log σ(w · x + b).
        options: See `Attention`; queries and keys are normalised by default, as in TRA.
    """

    default_qk_norm: ClassVar[bool] = True
    config_fields: ClassVar[tuple[str, ...]] = ("gate_bias",)

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int | None = None, *, gate_bias: float = 0.0, **options: Any
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        self.gate = ForgetGate(d_model, n_heads, gate_bias)

    def attend(self, given: Given) -> Tensor:
        if columns_fit(given):
            of_query = self.gate(given.x)
            of_key = -key_places(given)[:, None].to(of_query.dtype)
            return biased_softmax_attention(given, of_query, of_key, self.dropout_now)
        if flex_fits(given, self.dropout_now):
            return flex_softmax_attention(given, self.logit_function(given))
        return super().attend(given)

    def logit_function(self, given: Given) -> ScoreFunction:
        """`logits`, in the words of FlexAttention."""
        log_forget = self.gate(given.x)

        def logit(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + log_forget[batch, head, query] * (query - key + 1)

        return logit

    def logits(self, given: Given, rows: Tensor) -> Tensor:
        bias = self.gate(given.x)[:, :, rows, None] * distances(given, rows)
        return (super().logits(given, rows) + bias).masked_fill(~seen(given, rows), -torch.inf)


def distances(given: Given, rows: Tensor) -> Tensor:
    """`[B or 1, 1, R, Tk]`: tokens from a key up to the query, both counted."""
    place = key_places(given)[:, None]
    return place[:, :, given.past + rows, None] - place[:, :, None] + 1
