"""The definition of threshold relative attention in its plainest form: the judge of every other implementation.

It holds the whole `[B, H, Tq, Tk]` map and lets autograd derive the gradients. Half-precision inputs are computed in
float32, float64 stays float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tra.ops.dropout import keep_weights
from tra.ops.full_map import full_attention_map, weigh_values
from tra.ops.options import AttentionOptions
from tra.ops.visible import Visible


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    visible: Visible,
    options: AttentionOptions,
    seed: Tensor | None,
) -> Tensor:
    """Return weights times values. `score_bound` and `tolerance` don't matter here."""
    weights = full_attention_map(query, key, log_forget, visible, options).weights
    if options.dropout > 0:
        assert seed is not None
        rows = torch.arange(weights[..., 0].numel(), device=query.device).view(weights.shape[:-1])
        columns = torch.arange(weights.shape[-1], device=query.device)
        if visible.key_mask is not None:  # numbers among real keys: the place of padding changes nothing
            columns = (visible.key_mask.long().cumsum(-1) - 1)[:, None, None]
        weights = weights * keep_weights(seed, rows, columns, options.dropout) / (1 - options.dropout)
    return weigh_values(weights, value, visible.key_mask, query.dtype)
