"""Few queries over many keys in plain PyTorch: the newest keys first, and further back only while that can matter.

What the walk does block by block, for a query that decodes: a small map of the newest keys, a larger one if the bound
of `blockwise` doesn't allow to stop there. It asks the device, so it is for the CPU, and it needs a promised bound.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tra.ops.inputs import Visible, zero_masked
from tra.ops.reference import AttentionMap, reference_map
from tra.ops.stop_bound import log_rest

MOST_QUERIES = 16
"""More are a prompt, for which blocks of rows are faster."""
NEWEST = 256
"""Keys of the first map."""
GROWTH = 8
"""A next map has so many times the keys: what was looked at in vain is little beside it."""


def tail(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    visible: Visible,
    *,
    scale: float,
    threshold: float,
    score_bound: float,
    tolerance: float,
) -> Tensor:
    """Same result as `reference` up to rounding and `tolerance`. Keys that can't matter aren't read, nor free slots."""
    first, last, key_mask = visible
    end = min(key.shape[2], max(1, int(last.max()) + 1))
    keys = NEWEST
    while True:
        start = max(0, end - keys)
        mask = None if key_mask is None else key_mask[:, start:end]
        near = Visible((first - start).clamp(min=0), last - start, mask)
        part = reference_map(query, key[:, :, start:end], log_forget, near, scale=scale, threshold=threshold)
        left = (start - first).clamp(min=0)[:, None]
        if start == 0 or _rest_is_nothing(part, log_forget, left, score_bound, tolerance):
            break
        keys *= GROWTH
    value = value[:, :, start:end]
    if mask is not None:
        value = zero_masked(value, mask)
    value = value.to(part.weights.dtype).repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return (part.weights @ value).to(query.dtype)  # [B, H, Tq, Tk] @ [B, H, Tk, Dv] -> [B, H, Tq, Dv]


def _rest_is_nothing(
    part: AttentionMap, log_forget: Tensor, left: Tensor, score_bound: float, tolerance: float
) -> bool:
    """Whether `left` keys `[B, 1, Tq]` before the map weigh less than the tolerance, in every row."""
    logits = torch.where(part.kept, part.scores + log_forget[..., None] * part.distances, -torch.inf)
    highest = torch.full_like(log_forget, score_bound)
    rest = log_rest(log_forget, part.distances.amax(-1), left.to(log_forget.dtype).expand_as(log_forget), highest)
    done = (rest < logits.logsumexp(-1) + math.log(tolerance)) | (left == 0)  # a NaN is not done
    return bool(done.all())
