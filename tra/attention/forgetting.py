"""The Forgetting Transformer (Lin et al. 2025): every token forgets part of all that came before it."""

from __future__ import annotations

import torch
from torch import Tensor

from tra.attention.shared.flex import ScoreFunction
from tra.attention.shared.gated import BiasFactors, GatedAttention
from tra.attention.shared.inputs import AttentionInputs, visible_keys


class ForgettingAttention(GatedAttention):
    """Softmax attention over `q_i · k_j / √D + Σ log f_k`, the sum over tokens k after j up to i; f = σ(w · x + b).

    This is the form without output gate and norms ("LLaMA" in its paper), as in the comparison of the TRA paper.
    Arguments as for `GatedAttention`.
    """

    def bias_factors(self, inputs: AttentionInputs) -> BiasFactors:
        # The running sum at the query is the same for all its keys, so it doesn't change the softmax.
        return BiasFactors(None, -self.log_forget_sums(inputs))

    def logit_function(self, inputs: AttentionInputs) -> ScoreFunction:
        total = self.log_forget_sums(inputs)
        of_key = total.clone()  # FlexAttention takes gradients of a tensor that is indexed once

        def logit(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + total[batch, head, query] - of_key[batch, head, key]

        return logit

    def precompute(self, inputs: AttentionInputs) -> AttentionInputs:
        return inputs._replace(precomputed=self.log_forget_sums(inputs))

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        total = self.log_forget_sums(inputs) if inputs.precomputed is None else inputs.precomputed
        forgotten = total[:, :, inputs.past + rows, None] - total[:, :, None]
        return (super().logits(inputs, rows) + forgotten).masked_fill(~visible_keys(inputs, rows), -torch.inf)

    def log_forget_sums(self, inputs: AttentionInputs) -> Tensor:
        """Return running sums of log f up to each key, `[B, H, Tk]`, and cache log f. Padding forgets nothing."""
        log_forget = self.gate(inputs.x)
        if inputs.key_mask is not None:
            log_forget = log_forget * inputs.key_mask[:, None, inputs.past :]
        if inputs.cache is not None:
            log_forget = inputs.cache.extend("log_forget", log_forget)
        return log_forget.cumsum(-1)
