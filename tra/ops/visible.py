"""Which keys each query may see, in one form for all callers.

Whatever a caller passes (causal order, a static cache's `key_lengths`, packed documents), an implementation gets the
first and the last key of every query, and optionally a mask of real keys.
"""

from __future__ import annotations

from collections.abc import Callable
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


class PagedKeys(NamedTuple):
    """Keys and values in pages. Logical page l of row b is `table[b, l % N]`; queries stand at the end of the keys.

    Positions are int64, and count all tokens that a row has had. Kernels get smaller numbers as int32.
    """

    key: Tensor  # [P, Hkv, page, D]
    value: Tensor  # [P, Hkv, page, Dv]
    table: Tensor  # [B, N] int32
    lengths: Tensor  # [B]
    window: int | None

    @property
    def capacity(self) -> int:
        """Number of keys that fit the table."""
        return self.table.shape[1] * self.key.shape[2]

    def most_keys(self, n_queries: int) -> int | None:
        """Return the number of keys from the first to the last that queries may see; None is all, from key 0 on."""
        return None if self.window is None else min(self.capacity, self.window + n_queries - 1)

    def positions(self, n_queries: int) -> Tensor:
        """Return the queries' positions, `[B, Tq]`."""
        index = torch.arange(n_queries, device=self.lengths.device)
        return self.lengths.long()[:, None] - n_queries + index

    def first_keys(self, last: Tensor) -> Tensor:
        """Return the first key that queries at positions `last` may see: in the window, and not overwritten."""
        first = (self.lengths.long()[:, None] - self.capacity).clamp(min=0)
        return first.expand_as(last) if self.window is None else torch.maximum(first, last - (self.window - 1))

    def first_turn(self, n_queries: int) -> tuple[Tensor, Tensor]:
        """Return first and last key, `[B, Tq]` int32, less whole turns of the table: the columns stay the same.

        They are below twice the table's capacity, however long a row is.
        """
        last = self.positions(n_queries)
        first = self.first_keys(last)
        turns = first[:, :1] // self.capacity * self.capacity
        first, last = (x - turns for x in (first, last.clamp(min=-1)))
        return first.to(torch.int32).contiguous(), last.to(torch.int32).contiguous()

    def newest_pages(self, n_queries: int) -> tuple[Visible, Callable[[int], tuple[Tensor, Tensor]], int]:
        """Return the pages that queries may see, numbered so that the newest page of every row is the last.

        Returns:
            The visible range; a function that returns keys and values `[B, Hkv, end - start, ·]` from `start` on, a
            multiple of a page, copied side by side; and the number of keys, `end`.
        """
        page_size, columns = self.key.shape[2], self.table.shape[1]
        most = self.most_keys(n_queries)
        pages = columns if most is None else (most + page_size - 2) // page_size + 1
        base = (self.lengths.long() - 1).clamp(min=0) // page_size - (pages - 1)  # of each row, negative if it is short
        last = self.positions(n_queries)
        first = self.first_keys(last)
        first, last = (x - base[:, None] * page_size for x in (first, last.clamp(min=-1)))

        def read(start: int) -> tuple[Tensor, Tensor]:
            page = torch.arange(start // page_size, pages, device=base.device)
            where = self.table.long().gather(1, (base[:, None] + page).remainder(columns))
            key, value = (x[where].transpose(1, 2).flatten(2, 3) for x in (self.key, self.value))
            return key, value

        return Visible(first, last, None), read, pages * page_size

    def stand_ins(self, n_queries: int) -> tuple[Tensor, Tensor]:
        """Return tensors with the shapes of contiguous keys and values, without their contents."""
        most = self.most_keys(n_queries)
        sizes = (self.table.shape[0], -1, self.capacity if most is None else most, -1)
        return self.key[:1, :, :1].expand(sizes), self.value[:1, :, :1].expand(sizes)


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
