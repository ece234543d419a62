"""A cache of bounded memory: a ring of pages for each layer, which holds the window of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tra.attention.shared.cache import CacheView
from tra.attention.shared.paged_cache import PagedLayer, PagedRows, layer_windows
from tra.attention.shared.pages import PAGE_SIZE, Pages, WindowGuard
from tra.ops.visible import PagedKeys


class BoundedCache(PagedRows):
    """A cache of the last tokens only, so that memory doesn't grow with the text.

    Each layer is a ring: a new token overwrites the oldest. Queries see the last `window` real tokens of their row,
    their own included. It is for TRA, whose heads forget, and for rope, which it turns into sliding-window attention
    with positions that go on counting. Padding isn't stored, and lengths stay on the device, as in `StaticCache`.

    Args:
        n_layers: Layers of the decoder.
        windows: Tokens that queries see, one number for all layers or one for each.
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
        windows: int | Sequence[int],
        *,
        chunk: int = 256,
        sinks: int = 0,
        guard: bool | float = False,
    ) -> None:
        super().__init__()
        windows = layer_windows(n_layers, windows)
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        if sinks < 0:
            raise ValueError(f"sinks must be at least 0, got {sinks}")
        if guard is not False and guard is not True and not 0 < guard < 1:
            raise ValueError(f"guard must be a weight above 0 and below 1, or True or False, got {guard}")
        self.windows = windows
        self.sinks = sinks
        pinned = -(-sinks // PAGE_SIZE)
        self.layers: list[RingLayer] = [
            RingLayer(self, window, pinned + -(-(window + chunk - 1) // PAGE_SIZE), _new_guard(guard))
            for window in windows
        ]
        self.chunk = min((layer.columns - pinned) * PAGE_SIZE - layer.window + 1 for layer in self.layers)
        """Tokens that can be read at a time once the rings are full."""

    def begin(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `PackedRows`."""
        new, room = x.shape[1], min(layer.columns for layer in self.layers) * PAGE_SIZE
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
            for layer in self.layers:
                layer.select_rows(rows)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all keys and values, 0 before the first token."""
        return sum(layer.memory_bytes for layer in self.layers)

    def unmet_windows(self) -> list[dict[str, Any]]:
        """Return what the guard counted: for each layer `window`, `queries` and `unmet`, one number a head.

        `queries` is the number of queries with keys older than the window, `unmet` how many of them may need such keys.
        Waits for the device.
        """
        found = []
        for layer in self.layers:
            if layer.guard is None:
                raise ValueError("this bounded cache counts nothing: make it with guard=True")
            queries, unmet = int(layer.guard.queries), layer.guard.unmet.tolist()
            found.append({"window": layer.window, "queries": queries, "unmet": unmet})
        return found


class RingLayer(PagedLayer):
    """One layer of a `BoundedCache`."""

    def __init__(self, cache: BoundedCache, window: int, columns: int, guard: WindowGuard | None) -> None:
        super().__init__(cache)
        self._cache = cache
        self.window, self.columns, self.guard = window, columns, guard
        """Tokens that queries see, pages of each row, and the counter of queries that may need more."""

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


def _new_guard(guard: bool | float) -> WindowGuard | None:
    """Return the guard that the argument of `BoundedCache` asks for."""
    if guard is False:
        return None
    return WindowGuard(None if guard is True else guard)
