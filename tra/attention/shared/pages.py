"""Keys in pages as a layer sees them, softmax attention to them, and a guard that counts windows that are too short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.ops.inputs import PAGE_UNIT
from tra.ops.paged import windows_suffice
from tra.ops.visible import PagedKeys

PAGE_SIZE = PAGE_UNIT
"""Tokens of a page."""


class Pages(NamedTuple):
    """Keys and values in pages that a layer attends to."""

    keys: PagedKeys
    sinks: int = 0
    """First tokens of each row that stay visible."""
    guard: WindowGuard | None = None
    last_is_real: Tensor | None = None  # [B] bool: the last new token isn't padding; for the guard
    in_order: bool = True  # each row's pages are neighbours in the pool


class PagesByHead(NamedTuple):
    """Keys and values in pages where heads have windows of different lengths: some heads share pages."""

    groups: tuple[Pages, ...]
    heads: tuple[Tensor, ...]  # query heads of each group, in order
    places: Tensor  # [H]: where each head is among those of all groups, one group after another


def attend_by_group(
    attend: Callable[..., Tensor], pages: Pages | PagesByHead, query: Tensor, *others: Tensor
) -> Tensor:
    """Return `attend(query, *others, pages)` `[B, H, Tq, Dv]`, from a call for each group of heads.

    Args:
        query: `[B, H, Tq, D]`; the other tensors, too, have heads as their second dimension.
    """
    if isinstance(pages, Pages):
        return attend(query, *others, pages)
    if len(pages.places) != query.shape[1]:
        raise ValueError(f"windows by head must be one for each of {query.shape[1]} heads, got {len(pages.places)}")
    found = [
        attend(*(tensor[:, heads] for tensor in (query, *others)), group)
        for heads, group in zip(pages.heads, pages.groups, strict=True)
    ]
    return torch.cat(found, dim=1)[:, pages.places]


class WindowGuard:
    """A counter, for each head of a layer, of the queries whose window was not provably long enough.

    A query may need more than its window if the bound on the weight of all older keys is not below the tolerance. This
    says that older keys may matter, not that they do. While decoding, every query is counted; in a prompt, only the
    last query of each chunk. Numbers stay on the device.
    """

    def __init__(self, tolerance: float | None = None) -> None:
        self.tolerance = tolerance
        """Relative weight of older keys from which a query is counted; None is the layer's tolerance of early stops."""
        self.queries = torch.zeros((), dtype=torch.int64)
        """Number of queries that had keys older than the window."""
        self.unmet = torch.zeros(0, dtype=torch.int64)
        """`[H]`: number of these that may need older keys; empty before the first query."""

    def count(self, query: Tensor, log_forget: Tensor, pages: Pages, options: dict[str, Any]) -> None:
        """Count the last of the queries `[B, H, Tq, D]`."""
        if not len(self.unmet):
            self.queries = torch.zeros((), dtype=torch.int64, device=query.device)
            self.unmet = torch.zeros(query.shape[1], dtype=torch.int64, device=query.device)
        if self.tolerance is not None:
            options = options | {"tolerance": self.tolerance}
        key, value, table, lengths, window = pages.keys
        assert window is not None
        assert pages.last_is_real is not None
        enough = windows_suffice(
            query[:, :, -1:], key, value, log_forget[:, :, -1:], table, lengths, window=window, **options
        )
        self.queries += (pages.last_is_real & (lengths > window)).sum()
        self.unmet += (pages.last_is_real[:, None] & ~enough[:, :, 0]).sum(0)


def paged_softmax_attention(query: Tensor, pages: Pages) -> Tensor:
    """Return causal softmax attention of queries `[B, H, Tq, D]` to keys in pages, in any order.

    All slots are read: those of a ring in place, those of a shared pool as a copy.
    """
    if pages.guard is not None:
        raise ValueError("a window's guard is for TRA: without gates there is no bound on the weight of older keys")
    keys = pages.keys
    (batch, columns), page_size = keys.table.shape, keys.key.shape[2]
    if pages.in_order:
        key, value = (_slots(pool, batch * columns, batch) for pool in (keys.key, keys.value))
    else:
        key, value = (pool[keys.table.long()].transpose(1, 2).flatten(2, 3) for pool in (keys.key, keys.value))
    slot = torch.arange(columns * page_size, device=query.device)
    last = keys.lengths.long()[:, None] - 1
    pinned = -(-pages.sinks // page_size) * page_size
    turn = columns * page_size - pinned
    newest = last - (last - slot).remainder(turn)  # the newest token that this slot may have
    token = torch.where(slot < pinned, slot, newest)[:, None]  # [B, 1, slots]
    position = keys.positions(query.shape[2])[..., None]  # [B, Tq, 1]
    is_near = token > position - (keys.capacity if keys.window is None else keys.window)
    is_written = (slot < pinned) | (token >= pinned)
    visible = is_written & (token <= position) & (is_near | (slot < pages.sinks))
    visible |= ~visible.any(-1, keepdim=True)  # queries of padding may stand before the first key
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None], enable_gqa=grouped)


def _slots(pool: Tensor, pages: int, batch: int) -> Tensor:
    """Return the pool `[P, Hkv, page, D]` of a ring, whose pages are in the order of rows, as `[B, Hkv, slots, D]`."""
    return pool.transpose(1, 2)[:pages].reshape(batch, -1, pool.shape[1], pool.shape[3]).transpose(1, 2)
