"""The Forgetting Transformer (Lin et al. 2025): every token forgets part of all that came before it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tra.attention.shared.base import Given, seen
from tra.attention.shared.flex import ScoreFunction
from tra.attention.shared.gated import Factors, GatedAttention


class ForgettingAttention(GatedAttention):
    """Softmax attention over `q_i · k_j / √D + Σ log f_k`, the sum over tokens k after j up to i; f = σ(w · x + b).

    This is the form without output gate and norms ("LLaMA" in its paper), as in the comparison of the TRA paper.
    Arguments as for `GatedAttention`.
    """

    caches_more: ClassVar[bool] = True

    def factors(self, given: Given) -> Factors:
        # The running sum at the query is the same for all its keys, and softmax doesn't see it.
        return Factors(None, -self.remembered(given))

    def logit_function(self, given: Given) -> ScoreFunction:
        total = self.remembered(given)
        again = total.clone()  # what learns may be indexed once only

        def logit(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + total[batch, head, query] - again[batch, head, key]

        return logit

    def prepare(self, given: Given) -> Given:
        return given._replace(prepared=self.remembered(given))

    def logits(self, given: Given, rows: Tensor) -> Tensor:
        total = self.remembered(given) if given.prepared is None else given.prepared
        forgotten = total[:, :, given.past + rows, None] - total[:, :, None]
        return (super().logits(given, rows) + forgotten).masked_fill(~seen(given, rows), -torch.inf)

    def remembered(self, given: Given) -> Tensor:
        """Running sums of log f up to each key, `[B, H, Tk]`, also into the cache. Padding forgets nothing."""
        log_forget = self.gate(given.x)
        if given.key_mask is not None:
            log_forget = log_forget * given.key_mask[:, None, given.past :]
        total = log_forget.cumsum(-1)
        if given.cache is None:
            return total
        total = total + given.cache.state.get("forgotten", 0.0)
        given.cache.state["forgotten"] = total[..., -1:]
        return given.cache.extend("forgotten", total)
