"""TRA's second half without the first: no threshold, so distance is plain, times the gate of the query."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tra.attention.shared.base import Given, key_places, seen
from tra.attention.shared.flex import ScoreFunction
from tra.attention.shared.gated import Factors, GatedAttention


class DistanceOnlyAttention(GatedAttention):
    """Softmax over `q_i · k_j / √D + δ_i (i - j + 1)`, with δ = log σ(w · x + b).

    Arguments as for `GatedAttention`; queries and keys are normalised by default, as in TRA.
    """

    default_qk_norm: ClassVar[bool] = True

    def factors(self, given: Given) -> Factors:
        of_query = self.gate(given.x)
        return Factors(of_query, -key_places(given)[:, None].to(of_query.dtype))

    def logit_function(self, given: Given) -> ScoreFunction:
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
