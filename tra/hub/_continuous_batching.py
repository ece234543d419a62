"""transformers' continuous batching: new tokens of many requests in one row, keys and values in transformers' pages.

Nothing of it is imported. Its cache is used through `layer_to_allocator` and `update`, and its allocators through
`index`, `layer_type` and `get_cache_for_block_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor

from tra.attention import MECHANISMS, Cache, LayerCache
from tra.attention.shared.cache import CacheView
from tra.attention.shared.paged_cache import PagedLayer, PagedRows
from tra.attention.shared.pages import PAGE_SIZE, Pages
from tra.ops.visible import PagedKeys

OLDEST_TRANSFORMERS = (5, 19)
"""Before, its cache had other methods."""


def is_supported() -> bool:
    """Return whether the installed transformers is new enough."""
    major, minor = transformers.__version__.split(".")[:2]
    return (int(major), int(minor)) >= OLDEST_TRANSFORMERS


def check_support(mechanism: str, continuous_batching_config: Any) -> None:
    """Raise a ValueError if a mechanism, or the installed transformers, can't do continuous batching."""
    if not is_supported():
        raise ValueError(
            "continuous batching of TRA's models needs transformers "
            f"{'.'.join(map(str, OLDEST_TRANSFORMERS))} or newer, got {transformers.__version__}"
        )
    if not MECHANISMS[mechanism].takes_pages:
        raise ValueError(f"{mechanism} can't use keys in pages: continuous batching is for TRA and rope")
    if any(continuous_batching_config.cuda_graph_booleans):
        raise ValueError(
            "continuous batching of TRA's models doesn't go with CUDA graphs: set use_cuda_graph=False, "
            "which padding intervals turn on"
        )
    page_size = continuous_batching_config.page_size
    if page_size % PAGE_SIZE:
        raise ValueError(f"page_size must be a multiple of {PAGE_SIZE} for continuous batching, got {page_size}")


class PackedRequests:
    """The requests of one step, and where their keys and values are.

    A slot is a place of one token in transformers' cache. All layers are of one type, so they have the same slots.

    Args:
        arguments: What continuous batching passes to a model's forward besides tokens.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.cache, self._arguments = arguments["cache"], arguments
        allocator = self.cache.layer_to_allocator[0]
        self.ends_q: Tensor = arguments["cu_seq_lens_q"]  # [R + 1], as `cu_seqlens_q` of the operator
        self.ends_k: Tensor = arguments["cu_seq_lens_k"][allocator.layer_type]  # [R + 1]: cached and new tokens
        self.most_queries: int = arguments["max_length_q"]
        self.most_keys: int = arguments["max_length_k"][allocator.layer_type]
        self.new_slots: Tensor = arguments["write_index"][allocator.index]
        read: Tensor = arguments["read_index"][allocator.index]
        self.slots = read if read.numel() else self.new_slots  # nothing is read where all tokens are new
        """`[total_k]`: slots of all tokens, one request after another."""

    def run(self, run_rows: Callable[[Tensor, Any], Tensor], embeds: Tensor) -> Tensor:
        """Return the output of `run_rows` on packed tokens `[1, total_q, width]`.

        Requests with one new token, which is most of them, are the rows of one call. Each other request has a call of
        its own.
        """
        if embeds.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("continuous batching of TRA's models doesn't go with CUDA graphs: use_cuda_graph=False")
        out = torch.zeros_like(embeds)  # transformers may pad the row at its end
        single = torch.arange(len(self.ends_q) - 1, device=embeds.device)
        ranges: list[tuple[slice, slice]] = []  # of other requests: queries and keys
        if self.most_queries > 1:  # only then is the device read
            single = (self.ends_q.diff() == 1).nonzero()[:, 0]
            both = ([slice(*ends) for ends in pairwise(x.tolist())] for x in (self.ends_q, self.ends_k))
            ranges = [(queries, keys) for queries, keys in zip(*both, strict=True) if queries.stop - queries.start > 1]
        if len(single):
            place = self.ends_q[single].long()
            out[0, place] = run_rows(embeds[0, place, None], SingleTokens(self, single))[:, 0]
        for queries, keys in ranges:
            out[:, queries] = run_rows(embeds[:, queries], OneRequest(self, queries, keys))
        return out

    def update(self, key: Tensor, value: Tensor, layer: int, new: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values `[1, Hkv, T, D]` to slots `new`, and return those of slots `read`, or the new ones."""
        indices = {"write_index": [new], "read_index": [read]}
        return self.cache.update(key, value, layer, self._arguments | indices)

    @property
    def layers(self) -> range:
        return range(len(self.cache.layer_to_allocator))


class OneRequest(Cache):
    """The cache of one request with several new tokens, for one pass."""

    def __init__(self, requests: PackedRequests, queries: slice, keys: slice) -> None:
        self.layers = [OneRequestLayer(requests, layer, queries, keys) for layer in requests.layers]


class OneRequestLayer(LayerCache):
    """One layer of a request. All its keys are copied side by side."""

    def __init__(self, requests: PackedRequests, layer: int, queries: slice, keys: slice) -> None:
        # not the buffers of `LayerCache`: all tensors are in transformers' cache
        self.length = (keys.stop - keys.start) - (queries.stop - queries.start)
        self._requests, self._layer = requests, layer
        self._new, self._read = requests.new_slots[queries], requests.slots[keys if self.length else slice(0)]

    def add(self, key: Tensor, value: Tensor, _key_mask: Tensor | None) -> CacheView:
        return CacheView(*self._requests.update(key, value, self._layer, self._new, self._read), None, None)


class SingleTokens(PagedRows):
    """The cache of requests `[B]` with one new token each, for one pass. Pages are read in place."""

    def __init__(self, requests: PackedRequests, rows: Tensor) -> None:
        super().__init__()
        starts, ends = requests.ends_k[rows].long(), requests.ends_k[rows + 1].long()
        self.lengths = ends - starts - 1
        self.starts, self.last = starts[:, None], ends[:, None] - 1
        self.requests, self.new_slots = requests, requests.new_slots[requests.ends_q[rows].long()]
        self.layers = [SingleTokensLayer(self, layer) for layer in requests.layers]
        self._table: Tensor | None = None

    def table(self, page_size: int) -> Tensor:
        """Return the pages of each row, `[B, N]`. Columns that are not in use repeat the last page."""
        if self._table is None:
            first_keys = torch.arange(0, self.requests.most_keys, page_size, device=self.starts.device)
            slots = self.requests.slots[torch.minimum(self.starts + first_keys, self.last)]
            self._table = (slots // page_size).int()
        return self._table


class SingleTokensLayer(PagedLayer):
    """One layer of these requests."""

    def __init__(self, cache: SingleTokens, layer: int) -> None:
        super().__init__(cache)
        self._cache, self._layer = cache, layer

    def add(self, key: Tensor, value: Tensor, _key_mask: Tensor | None) -> CacheView:
        rows = self._cache
        key, value = (x.transpose(0, 2) for x in (key, value))  # [B, Hkv, 1, D] -> [1, Hkv, B, D]
        rows.requests.update(key, value, self._layer, rows.new_slots, rows.new_slots[:0])
        allocator = rows.requests.cache.layer_to_allocator[self._layer]
        keys, values = (x.transpose(1, 2) for x in allocator.get_cache_for_block_table(self._layer))
        pages = PagedKeys(keys, values, rows.table(keys.shape[2]), rows.new_lengths, None)
        return CacheView(key, value, None, None, Pages(pages, in_order=False))
