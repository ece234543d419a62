"""Which keys each query may see, in one form for all callers.

Whatever a caller passes (causal order, a static cache's `key_lengths`, packed documents), an implementation gets the
first and the last key of every query, and optionally a mask of real keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Visible(NamedTuple):
    """The keys that a query may see: `first <= j <= last`, and `key_mask[j]` where there is a mask."""

    first: Tensor  # [B, Tq] int64
    last: Tensor  # [B, Tq] int64; below `first` where a query sees nothing
    key_mask: Tensor | None  # [B, Tk] bool


def visible_keys(query: Tensor, key: Tensor, key_mask: Tensor | None, key_lengths: Tensor | None) -> Visible:
    """Return the keys of queries that stand at the end of the keys: query i sees keys up to length - Tq + i."""
    batch, _, n_queries, _ = query.shape
    index = torch.arange(n_queries, device=query.device)
    if key_lengths is None:
        last = (index + (key.shape[2] - n_queries)).expand(batch, -1)
    else:
        last = index + (key_lengths.long()[:, None] - n_queries)
    return Visible(torch.zeros_like(last), last, key_mask)


def visible_in_sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int) -> Visible:
    """Return the keys of packed sequences as one row: those of a query's own sequence, aligned at its end."""
    index = torch.arange(total_q, device=cu_seqlens_q.device)
    ends_q, ends_k = cu_seqlens_q.long()[1:], cu_seqlens_k.long()[1:]
    sequence = torch.searchsorted(ends_q, index, right=True).clamp_(max=len(ends_q) - 1)
    first = cu_seqlens_k.long()[sequence]
    last = ends_k[sequence] - (ends_q[sequence] - index)
    return Visible(first[None], last[None], None)


def zero_masked(tensor: Tensor, key_mask: Tensor) -> Tensor:
    """Return `[B, Hkv, Tk, *]` with masked slots at 0: their contents are never used, not even as 0 · NaN."""
    return tensor.masked_fill(~key_mask[:, None, :, None], 0.0)


def without_padding(
    key: Tensor, value: Tensor, first: Tensor, last: Tensor, key_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Move real keys to the front, in order. Masked keys never count, so only the ends of each row's range change."""
    order = torch.argsort(~key_mask, dim=-1, stable=True)
    real = key_mask.gather(1, order)[:, None, :, None]
    key, value = (
        torch.where(real, tensor.gather(2, order[:, None, :, None].expand_as(tensor)), 0.0) for tensor in (key, value)
    )
    before = F.pad(key_mask.long().cumsum(-1), (1, 0))  # [B, Tk + 1]: real keys in 0..j-1
    first = before.gather(1, first)
    last = before.gather(1, (last + 1).clamp(min=0)) - 1
    return key, value, first, last
