"""A cache of bounded memory: rings of pages for each layer, which hold the window of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tra.attention.shared.cache import CacheView, PackedLayer
from tra.attention.shared.paged_cache import PagedLayer, PagedRows, windows_by_layer_or_head
from tra.attention.shared.pages import PAGE_SIZE, Pages, PagesByHead, WindowGuard
from tra.ops.visible import PagedKeys


class BoundedCache(PagedRows):
    """A cache of the last tokens only, so that memory doesn't grow with the text.

    Each layer is a ring: a new token overwrites the oldest. Queries see the last `window` real tokens of their row,
    their own included. It is for TRA, whose heads forget, and for rope, which it turns into sliding-window attention
    with positions that go on counting. Padding isn't stored, and lengths stay on the device, as in `StaticCache`.

    Args:
        n_layers: Layers of the decoder.
        windows: Tokens that queries see: one number for all layers, or for each layer one, or for each layer one for
            each of its heads. Heads whose windows fill as many pages share a ring, and see the largest of their
            windows. So do query heads that share a key head.
        chunk: Most tokens of a prompt that are read at a time. Each layer holds `window + chunk - 1` tokens,
            rounded up to whole pages of 64.
        sinks: First tokens of each row that stay visible besides the window (Xiao et al. 2023); for rope.
        guard: Count how often heads may need more than their window, see `WindowGuard`; for TRA. A query is counted if
            older keys may have more than this relative weight. True takes the tolerance of the early stop, which is
            very small. The guard computes a map of the window in every step.
    """

    def __init__(
        self,
        n_layers: int,
        windows: int | Sequence[int | Sequence[int]],
        *,
        chunk: int = 256,
        sinks: int = 0,
        guard: bool | float = False,
    ) -> None:
        super().__init__()
        self.windows = windows_by_layer_or_head(n_layers, windows)
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        if sinks < 0:
            raise ValueError(f"sinks must be at least 0, got {sinks}")
        if guard is not False and guard is not True and not 0 < guard < 1:
            raise ValueError(f"guard must be a weight above 0 and below 1, or True or False, got {guard}")
        self.sinks = sinks
        pinned = -(-sinks // PAGE_SIZE)

        def ring(window: int) -> RingLayer:
            return RingLayer(self, window, pinned + -(-(window + chunk - 1) // PAGE_SIZE), _new_guard(guard))

        self.layers: list[RingLayer | RingsByHead] = [
            ring(window) if isinstance(window, int) else RingsByHead(self, [ring(each) for each in window])
            for window in self.windows
        ]
        self.chunk = min((ring.columns - pinned) * PAGE_SIZE - ring.window + 1 for ring in self._rings)
        """Tokens that can be read at a time once the rings are full."""

    @property
    def _rings(self) -> list[RingLayer]:
        return [ring for layer in self.layers for ring in layer.rings]

    def begin(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `PackedRows`."""
        new, room = x.shape[1], min(ring.columns for ring in self._rings) * PAGE_SIZE
        if new > self.chunk and self.length + new > room:
            raise ValueError(
                f"this bounded cache takes at most {self.chunk:,} tokens at a time, got {new:,}: read the prompt in "
                "chunks, or give the cache a larger chunk"
            )
        return super().begin(x, key_mask)

    def select_rows(self, rows: Tensor) -> None:
        """Replace the batch by its rows `[N]`, as a beam search does. A row may be chosen several times."""
        if self.lengths is not None:
            self.lengths = self.lengths[rows]
            for ring in self._rings:
                ring.select_rows(rows)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all keys and values, 0 before the first token."""
        return sum(ring.memory_bytes for ring in self._rings)

    def unmet_windows(self) -> list[dict[str, Any]]:
        """Return what the guard counted: for each layer `window`, `queries` and `unmet`.

        `queries` is the number of queries with keys older than the window, `unmet`, one number a head, how many of them
        may need such keys. Where heads have windows of their own, all three are lists by head. Waits for the device.
        """
        return [layer.unmet_windows() for layer in self.layers]


class RingLayer(PagedLayer):
    """One layer of a `BoundedCache`."""

    def __init__(self, cache: BoundedCache, window: int, columns: int, guard: WindowGuard | None) -> None:
        super().__init__(cache)
        self._cache = cache
        self.window, self.columns, self.guard = window, columns, guard
        """Tokens that queries see, pages of each row, and the counter of queries that may need more."""
        self.rings = [self]

    def unmet_windows(self) -> dict[str, Any]:
        """See `BoundedCache`."""
        if self.guard is None:
            raise ValueError("this bounded cache counts nothing: make it with guard=True")
        return {"window": self.window, "queries": int(self.guard.queries), "unmet": self.guard.unmet.tolist()}

    @property
    def memory_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers or ())

    def add(self, key: Tensor, value: Tensor, _key_mask: Tensor | None) -> CacheView:
        """Write the new keys and values over the oldest."""
        batch, sinks = key.shape[0], self._cache.sinks
        pages = batch * self.columns
        if self._buffers is None:
            # pages of zeros, and one page for padding; all heads of a token are side by side in memory
            shapes = ((pages + 1, PAGE_SIZE, new.shape[1], new.shape[3]) for new in (key, value))
            key_buffer, value_buffer = (key.new_zeros(shape) for shape in shapes)
            self._buffers = key_buffer, value_buffer
            self._table = torch.arange(pages, dtype=torch.int32, device=key.device).view(batch, self.columns)
        places = self._cache.places(self._table, -(-sinks // PAGE_SIZE), pages)
        pools = self.write(key, value, places)
        keys = PagedKeys(*pools, self._table, self._cache.new_lengths, self.window)
        last_is_real = ~self._cache.is_padding[:, -1]
        return CacheView(key, value, None, None, Pages(keys, sinks, self.guard, last_is_real))

    def select_rows(self, rows: Tensor) -> None:
        """See `BoundedCache`."""
        if self._buffers is None:
            return
        pages = self._table[rows].flatten().long()
        padding_page = pages.new_full((1,), self._buffers[0].shape[0] - 1)
        key, value = (buffer[torch.cat([pages, padding_page])] for buffer in self._buffers)
        self._buffers = key, value
        self._table = torch.arange(len(pages), dtype=torch.int32, device=pages.device).view(len(rows), self.columns)


class RingsByHead(PackedLayer):
    """One layer of a `BoundedCache` whose heads have windows of their own: a ring for each number of pages.

    Args:
        each: A ring for each query head. Of those with as many pages, the one with the largest window is used.
    """

    def __init__(self, cache: BoundedCache, each: list[RingLayer]) -> None:
        super().__init__(cache)
        largest: dict[int, RingLayer] = {}
        for ring in sorted(each, key=lambda ring: ring.window):
            largest[ring.columns] = ring
        self.rings = list(largest.values())
        self._pages_of_heads = [ring.columns for ring in each]
        self._windows, self._n_heads = [ring.window for ring in each], len(each)
        self._key_heads: list[Tensor] = []  # of each ring; empty before the first token
        self._heads: list[Tensor] = []  # query heads of each ring
        self._places = torch.zeros(0, dtype=torch.int64)

    @property
    def guard(self) -> WindowGuard | None:
        return self.rings[0].guard

    def add(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> CacheView:
        """Write each head's new keys and values over the oldest of its ring."""
        if not self._key_heads:
            self._deal_heads(key.shape[1], key.device)
        groups = []
        for ring, heads in zip(self.rings, self._key_heads, strict=True):
            pages = ring.add(key[:, heads], value[:, heads], key_mask).pages
            assert isinstance(pages, Pages)
            groups.append(pages)
        return CacheView(key, value, None, None, PagesByHead(tuple(groups), tuple(self._heads), self._places))

    def _deal_heads(self, key_heads: int, device: torch.device) -> None:
        """Choose a ring for each key head, the smallest that holds the windows of its query heads."""
        if self._n_heads % key_heads:
            raise ValueError(
                f"windows by head must be one for each head, got {self._n_heads} for {key_heads} key heads"
            )
        group = self._n_heads // key_heads
        needed = [max(self._pages_of_heads[head * group : (head + 1) * group]) for head in range(key_heads)]
        self.rings = [ring for ring in self.rings if ring.columns in needed]
        own = [[head for head in range(key_heads) if needed[head] == ring.columns] for ring in self.rings]
        heads = [[head * group + index for head in part for index in range(group)] for part in own]
        for ring, part in zip(self.rings, heads, strict=True):
            ring.window = max(self._windows[head] for head in part)
        self._key_heads = [torch.tensor(part, device=device) for part in own]
        self._heads = [torch.tensor(part, device=device) for part in heads]
        self._places = torch.tensor([head for part in heads for head in part], device=device).argsort()

    def unmet_windows(self) -> dict[str, Any]:
        """See `BoundedCache`."""
        by_head = {"window": list(self._windows), "queries": [0] * self._n_heads, "unmet": [0] * self._n_heads}
        for ring, heads in zip(self.rings, self._heads or [torch.zeros(0)] * len(self.rings), strict=True):
            counts = ring.unmet_windows()
            for index, head in enumerate(heads.tolist()):
                by_head["window"][head], by_head["queries"][head] = counts["window"], counts["queries"]
                if counts["unmet"]:  # empty before the first query
                    by_head["unmet"][head] = counts["unmet"][index]
        return by_head


def _new_guard(guard: bool | float) -> WindowGuard | None:
    """Return the guard that the argument of `BoundedCache` asks for."""
    if guard is False:
        return None
    return WindowGuard(None if guard is True else guard)
