"""The whole map of attention in its plainest form, which `reference` and `newest_first` are built on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.compiler_workarounds import count_from_the_right, softmax_or_nothing
from tra.ops.options import AttentionOptions
from tra.ops.visible import Visible, zero_masked


class AttentionMap(NamedTuple):
    """The attention of every query to every key, each `[B, H, Tq, Tk]`."""

    weights: Tensor  # rows sum to 1, or to 0 where nothing is kept
    kept: Tensor  # bool: stays in the softmax
    distances: Tensor  # 1 + keys counted right of j, up to the query; 0 where not kept
    scores: Tensor  # scaled q·k, before distance
    counted: Tensor  # bool: counts as distance; the kept keys outside the margin

    def logits(self, log_forget: Tensor) -> Tensor:
        """Return what the weights are the softmax of; -inf where a key isn't kept."""
        return _logits(self.scores, self.kept, self.distances, log_forget)


def full_attention_map(
    query: Tensor, key: Tensor, log_forget: Tensor, visible: Visible, options: AttentionOptions
) -> AttentionMap:
    """Return all scores, kept keys, contextualised distances and weights, without dropout."""
    dtype = log_forget.dtype
    group = query.shape[1] // key.shape[1]
    if visible.key_mask is not None:
        key = zero_masked(key, visible.key_mask)
    key = key.to(dtype).repeat_interleave(group, dim=1)
    scores = query.to(dtype) @ key.mT * options.scale  # [B, H, Tq, D] @ [B, H, D, Tk] -> [B, H, Tq, Tk]

    index = torch.arange(key.shape[2], device=key.device)
    seen = (visible.first[..., None] <= index) & (index <= visible.last[..., None])  # [B, Tq, Tk]
    if visible.key_mask is not None:
        seen = seen & visible.key_mask[:, None, :]
    counted = seen[:, None] & ~(scores <= options.threshold)  # not "scores > threshold": a NaN score must show
    distances = count_from_the_right(counted, dtype)  # counted keys in j..i
    if options.has_margin:
        kept = seen[:, None] & ~(scores <= options.lower_cut)
        right = distances - counted.to(dtype)  # counted keys right of j
        # Softmax doesn't change if every distance is one less. With 1 more, S + δ would lose digits of S.
        weights = softmax_or_nothing(_logits(scores, kept, right, log_forget))
        return AttentionMap(weights, kept, (right + 1) * kept, scores, counted)
    distances = distances * counted
    weights = softmax_or_nothing(_logits(scores, counted, distances, log_forget))
    return AttentionMap(weights, counted, distances, scores, counted)


def _logits(scores: Tensor, kept: Tensor, distances: Tensor, log_forget: Tensor) -> Tensor:
    return torch.where(kept, scores + log_forget[..., None] * distances, -torch.inf)


def weigh_values(weights: Tensor, value: Tensor, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `weights` `[B, H, Tq, Tk]` times values `[B, Hkv, Tk, Dv]`, as `[B, H, Tq, Dv]` in `dtype`."""
    if key_mask is not None:
        value = zero_masked(value, key_mask)
    value = value.to(weights.dtype).repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    return (weights @ value).to(dtype)
