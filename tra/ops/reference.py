"""The definition of threshold relative attention in its plainest form: the judge of every other implementation.

It holds the whole `[B, H, Tq, Tk]` map and lets autograd derive the gradients. Half-precision inputs are
computed in float32, float64 stays float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.counting import count_from_the_right
from tra.ops.dropout import keep_weights
from tra.ops.inputs import Visible, compute_dtype, zero_masked
from tra.ops.softmax import softmax_or_nothing


class AttentionMap(NamedTuple):
    """What every query makes of every key, each `[B, H, Tq, Tk]`."""

    weights: Tensor  # rows sum to 1, or to 0 where nothing is kept
    kept: Tensor  # bool
    distances: Tensor  # kept keys from j up to the query, both ends counted; 0 where not kept
    scores: Tensor  # scaled q·k, before distance


def reference_map(
    query: Tensor, key: Tensor, log_forget: Tensor, visible: Visible, *, scale: float, threshold: float
) -> AttentionMap:
    """Scores, kept keys, contextualised distances and weights, all of them."""
    dtype = compute_dtype(query.dtype)
    group = query.shape[1] // key.shape[1]
    if visible.key_mask is not None:
        key = zero_masked(key, visible.key_mask)
    key = key.to(dtype).repeat_interleave(group, dim=1)
    scores = query.to(dtype) @ key.mT * scale  # [B, H, Tq, D] @ [B, H, D, Tk] -> [B, H, Tq, Tk]

    index = torch.arange(key.shape[2], device=key.device)
    seen = (visible.first[..., None] <= index) & (index <= visible.last[..., None])  # [B, Tq, Tk]
    if visible.key_mask is not None:
        seen = seen & visible.key_mask[:, None, :]
    kept = seen[:, None] & ~(scores <= threshold)  # not "scores > threshold": a NaN score must show

    distances = count_from_the_right(kept, dtype) * kept  # kept keys in j..i
    logits = torch.where(kept, scores + log_forget[..., None] * distances, -torch.inf)
    return AttentionMap(softmax_or_nothing(logits), kept, distances, scores)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    visible: Visible,
    *,
    scale: float,
    threshold: float,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """Weights times values. The promises and tolerances of the fast implementations don't concern it."""
    weights = reference_map(query, key, log_forget, visible, scale=scale, threshold=threshold).weights
    if dropout > 0:
        assert seed is not None
        rows = torch.arange(weights[..., 0].numel(), device=query.device).view(weights.shape[:-1])
        columns = torch.arange(weights.shape[-1], device=query.device)
        if visible.key_mask is not None:  # places among real keys: where padding stands changes nothing
            columns = (visible.key_mask.long().cumsum(-1) - 1)[:, None, None]
        weights = weights * keep_weights(seed, rows, columns, dropout) / (1 - dropout)
    if visible.key_mask is not None:
        value = zero_masked(value, visible.key_mask)
    value = value.to(weights.dtype).repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return (weights @ value).to(query.dtype)  # [B, H, Tq, Tk] @ [B, H, Tk, Dv] -> [B, H, Tq, Dv]
