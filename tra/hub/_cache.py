"""Adapters that make transformers' caches, growing and static, caches of a decoder.

An adapter lives for one pass. Keys, values and lengths stay in transformers' own objects, so that beam search, cropping
and offloading work on all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers.cache_utils import StaticLayer

from tra.attention import MECHANISMS, Cache, LayerCache
from tra.attention.shared.cache import CacheView, check_no_grad
from tra.hub.config import TRAConfig


def adapt(
    cache: TransformersCache, config: TRAConfig, x: Tensor, attention_mask: Tensor | None
) -> tuple[Cache, Tensor | None]:
    """Return a decoder's cache around `cache` for new tokens x `[B, T, d_model]`, and the mask for the decoder."""
    mechanism, kind = config.mechanism, MECHANISMS[config.mechanism]
    if not isinstance(cache, TransformersCache):
        raise ValueError(f"past_key_values must be a Cache of transformers, got a {type(cache).__name__}")
    if kind.caches_more:
        raise ValueError(
            f"{mechanism} keeps more than keys and values, which caches of transformers can't hold: generate with "
            "use_cache=False"
        )
    if not is_static(cache):
        return GrowingCache(cache, config.num_hidden_layers), real_keys(
            attention_mask, x.shape[0], cache.get_seq_length() + x.shape[1]
        )
    if not kind.takes_key_lengths:
        raise ValueError(f"{mechanism} can't use a static cache: generate with a dynamic one")
    return FixedCache(cache, config.num_hidden_layers, x, attention_mask), None


def is_static(cache: TransformersCache) -> bool:
    """Return whether transformers' cache has buffers of a fixed size."""
    return bool(cache.layers) and isinstance(cache.layers[0], StaticLayer)


def real_keys(attention_mask: Tensor | None, batch: int, most: int, least: int | None = None) -> Tensor | None:
    """Return a mask as bool, after checking its shape: `[batch, least..most]`.

    None if it hides no token, which is faster. That reads the mask from the device, so a compiled graph doesn't check.
    """
    if attention_mask is None:
        return None
    least = most if least is None else least
    shape = tuple(attention_mask.shape)
    if attention_mask.ndim != 2 or shape[0] != batch or not least <= shape[1] <= most:
        width = f"{most}" if least == most else f"{least} to {most}"
        raise ValueError(
            f"attention_mask must be [{batch}, {width}] (cached and new tokens), 0 at padding, got {shape}"
        )
    mask = attention_mask.bool()
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask


class GrowingCache(Cache):
    """A `DynamicCache`, or one that behaves like it."""

    def __init__(self, cache: TransformersCache, n_layers: int) -> None:
        self.layers = [HubLayerCache(cache, index) for index in range(n_layers)]


class HubLayerCache(LayerCache):
    """One layer of a growing cache, for one pass. It serves a mechanism as cache, also in a model that isn't TRA's.

    Args:
        cache: The `past_key_values` of transformers.
        index: Number of the layer.
    """

    def __init__(self, cache: TransformersCache, index: int) -> None:
        super().__init__()
        if is_static(cache):
            raise ValueError("a layer by itself takes a dynamic cache, not a static one")
        self.length = cache.get_seq_length(index)
        self._cache, self._index = cache, index

    def add(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> CacheView:
        return CacheView(*self._cache.update(key, value, self._index), key_mask, None)


class FixedCache(Cache):
    """A `StaticCache`: tokens are stored in their order, padding included, and only the device knows their number.

    So the mask is over slots, and the decoder receives none. The first tokens read only their own slots, not free ones.
    """

    def __init__(self, cache: TransformersCache, n_layers: int, x: Tensor, attention_mask: Tensor | None) -> None:
        batch, new = x.shape[:2]
        capacity, start = cache.get_max_length(0), cache.get_seq_length()
        self.is_first = isinstance(start, int)  # nothing is allocated yet
        if x.device.type == "cpu" and not torch.compiler.is_compiling() and int(start) + new > capacity:
            raise ValueError(f"a static cache of {capacity:,} tokens can't take {new:,} more after {int(start):,}")
        slots = start + torch.arange(new, device=x.device)[None]  # a copy: the cache changes its own count
        self.key_lengths = None if self.is_first else (slots[:, -1] + 1).expand(batch)
        self.positions, self.key_mask = slots, real_keys(attention_mask, batch, capacity, new)
        if self.key_mask is not None:
            # key_lengths hides free slots; a negative width cuts off those that the first tokens don't see.
            width = new if self.is_first else capacity
            self.key_mask = F.pad(self.key_mask, (0, width - self.key_mask.shape[1]), value=True)
            self.positions = (self.key_mask.long().cumsum(-1) - 1).clamp(min=0).gather(1, slots.expand(batch, -1))
        self.layers = [FixedLayer(cache, index, self) for index in range(n_layers)]


class FixedLayer(LayerCache):
    """One layer of a static cache."""

    def __init__(self, cache: TransformersCache, index: int, whole: FixedCache) -> None:
        super().__init__()
        self._cache, self._index, self._whole = cache, index, whole

    def positions(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return self._whole.positions

    def add(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> CacheView:
        check_no_grad(key, value)
        keys, values = self._cache.update(key, value, self._index)
        if self._whole.is_first:
            keys, values = (buffer[:, :, : key.shape[2]] for buffer in (keys, values))
        return CacheView(keys, values, self._whole.key_mask, self._whole.key_lengths)
