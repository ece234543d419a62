"""A cache for serving: a pool of pages that many texts share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tra.attention.shared.cache import CacheView
from tra.attention.shared.paged_cache import PagedLayer, PagedRows, layer_windows
from tra.attention.shared.pages import PAGE_SIZE, Pages
from tra.ops.visible import PagedKeys


class PooledCache(PagedRows):
    """A pool of pages that many texts share. `select` chooses the rows of each pass.

    Args:
        n_layers: Layers of the decoder.
        pages: Pages of the pool, the same in all layers.
        windows: Tokens that queries see, one number for all layers or one for each; None is all.
    """

    def __init__(self, n_layers: int, pages: int, windows: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.pages = pages
        self.table: Tensor | None = None
        each = (None,) * n_layers if windows is None else layer_windows(n_layers, windows)
        self.layers = [PooledLayer(self, window) for window in each]

    def select(self, table: Tensor, lengths: Tensor) -> None:
        """Choose the rows of the next pass.

        Args:
            table: `[B, N]` int32: page l of a row's text is `table[b, l % N]`, those of the new tokens included.
            lengths: `[B]` int64: number of tokens that each row has stored.
        """
        self.table, self.lengths = table, lengths


class PooledLayer(PagedLayer):
    """One layer of a `PooledCache`."""

    def __init__(self, cache: PooledCache, window: int | None) -> None:
        super().__init__(cache)
        self._cache, self._window = cache, window

    def add(self, key: Tensor, value: Tensor, _key_mask: Tensor | None) -> CacheView:
        """Write the new keys and values to their rows' pages."""
        table = self._cache.table
        assert table is not None
        if self._buffers is None:
            shapes = ((self._cache.pages, PAGE_SIZE, new.shape[1], new.shape[3]) for new in (key, value))
            key_buffer, value_buffer = (key.new_zeros(shape) for shape in shapes)
            self._buffers = key_buffer, value_buffer
        pools = self.write(key, value, self._cache.places(table, 0, 0))
        keys = PagedKeys(*pools, table, self._cache.new_lengths, self._window)
        return CacheView(key, value, None, None, Pages(keys, in_order=False))
