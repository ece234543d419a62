"""Stick-breaking attention (Tan et al. 2024): from near to far, each key takes its share of what is left."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention.shared.inputs import AttentionInputs, scores, visible_keys
from tra.attention.shared.row_blocks import DenseAttention
from tra.ops.compiler_workarounds import sum_from_the_right


class StickBreakingAttention(DenseAttention):
    """`A_ij = σ(S_ij) Π (1 - σ(S_ik))`, over keys k between j and i; the rest goes to the token itself.

    As in the authors' models, a query doesn't score its own key. See `Attention`.
    """

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        """Return the logarithms of the weights."""
        content = scores(inputs, rows)
        own = torch.arange(content.shape[-1], device=content.device) == (inputs.past + rows)[:, None]
        earlier = visible_keys(inputs, rows) & ~own
        taken = F.logsigmoid(content)
        left = (taken - content).masked_fill(~earlier, 0.0)  # log(1 - σ(S))
        nearer = sum_from_the_right(left) - left
        logits = (taken + nearer).masked_fill(~earlier, -torch.inf)
        return torch.where(own, left.sum(-1, keepdim=True), logits)

    def weigh(self, logits: Tensor) -> Tensor:
        return logits.exp()
