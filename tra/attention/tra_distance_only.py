"""TRA's second half without the first: no threshold, so distance counts all keys, times the gate of the query."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tra.attention.shared.flex import ScoreFunction
from tra.attention.shared.gated import BiasFactors, GatedAttention
from tra.attention.shared.inputs import AttentionInputs, key_positions, visible_keys


class DistanceOnlyAttention(GatedAttention):
    """Softmax over `q_i · k_j / √D + δ_i (i - j + 1)`, with δ = log σ(w · x + b).

    Arguments as for `GatedAttention`; queries and keys are normalised by default, as in TRA.
    """

    default_qk_norm: ClassVar[bool] = True

    def bias_factors(self, inputs: AttentionInputs) -> BiasFactors:
        log_forget = self.gate(inputs.x)
        return BiasFactors(log_forget, -key_positions(inputs)[:, None].to(log_forget.dtype))

    def logit_function(self, inputs: AttentionInputs) -> ScoreFunction:
        log_forget = self.gate(inputs.x)

        def logit(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + log_forget[batch, head, query] * (query - key + 1)

        return logit

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        bias = self.gate(inputs.x)[:, :, rows, None] * distances(inputs, rows)
        return (super().logits(inputs, rows) + bias).masked_fill(~visible_keys(inputs, rows), -torch.inf)


def distances(inputs: AttentionInputs, rows: Tensor) -> Tensor:
    """Return the number of tokens from a key up to the query, both included, `[B or 1, 1, R, Tk]`."""
    position = key_positions(inputs)[:, None]
    return position[:, :, inputs.past + rows, None] - position[:, :, None] + 1
