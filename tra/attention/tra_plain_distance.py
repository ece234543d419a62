"""TRA with the threshold, but a distance that counts all keys, also those below the threshold."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from tra.attention.shared.flex import ScoreFunction
from tra.attention.shared.gated import GatedAttention
from tra.attention.shared.inputs import AttentionInputs, scores, visible_keys
from tra.attention.tra_distance_only import distances
from tra.ops.options import AttentionOptions


class PlainDistanceAttention(GatedAttention):
    """Softmax over `q_i · k_j / √D + δ_i (i - j + 1)`, over keys above `threshold - margin`; a row may keep nothing.

    Args:
        gate_bias: Initial bias of the forget gate.
        threshold: See `margin`. All keys count as distance, so only `threshold - margin` has an effect.
        margin: A key stays when its scaled score is above `threshold - margin`. At infinity every key stays.
        options: See `GatedAttention`; queries and keys are normalised by default, as in TRA.
    """

    default_qk_norm: ClassVar[bool] = True
    config_fields: ClassVar[tuple[str, ...]] = ("gate_bias", "threshold", "margin")

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        gate_bias: float = 0.0,
        threshold: float = 0.0,
        margin: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, gate_bias=gate_bias, **options)
        self.lower_cut = AttentionOptions(1.0, threshold, margin=margin).lower_cut
        self.threshold, self.margin = threshold, margin

    def logit_function(self, inputs: AttentionInputs) -> ScoreFunction:
        log_forget, lower_cut = self.gate(inputs.x), self.lower_cut

        def logit(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            bias = log_forget[batch, head, query] * (query - key + 1)
            return torch.where(score <= lower_cut, -torch.inf, score + bias)

        return logit

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        content = scores(inputs, rows)
        kept = visible_keys(inputs, rows) & ~(content <= self.lower_cut)  # a NaN must show
        biased = content + self.gate(inputs.x)[:, :, rows, None] * distances(inputs, rows)
        return torch.where(kept, biased, -torch.inf)
