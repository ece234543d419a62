"""Caches of transformers, growing and static, as what a decoder takes for a cache.

An adapter lives for one pass. Keys, values and lengths stay in transformers' own objects, so that whatever transformers
does with those (beam search, cropping, offloading) is done to all there is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers.cache_utils import StaticLayer

from tra.attention import MECHANISMS, Cache, LayerCache
from tra.attention.shared.cache import Held, _check_no_grad
from tra.model import DecoderConfig


def adapt(
    cache: TransformersCache, config: DecoderConfig, x: Tensor, attention_mask: Tensor | None
) -> tuple[Cache, Tensor | None]:
    """A decoder's cache around `cache` for new tokens x `[B, T, d_model]`, and the mask to hand to the decoder."""
    mechanism, kind = config.mechanism, MECHANISMS[config.mechanism]
    if not isinstance(cache, TransformersCache):
        raise ValueError(f"past_key_values must be a Cache of transformers, got a {type(cache).__name__}")
    if kind.caches_more:
        raise ValueError(
            f"{mechanism} keeps more than keys and values, which caches of transformers can't hold: generate with "
            "use_cache=False"
        )
    if not is_static(cache):
        return GrowingCache(cache, config.n_layers), real_keys(
            attention_mask, x.shape[0], cache.get_seq_length() + x.shape[1]
        )
    if not kind.takes_key_lengths:
        raise ValueError(f"{mechanism} can't use a static cache: generate with a dynamic one")
    return FixedCache(cache, config.n_layers, x, attention_mask), None


def is_static(cache: TransformersCache) -> bool:
    return bool(cache.layers) and isinstance(cache.layers[0], StaticLayer)


def real_keys(attention_mask: Tensor | None, batch: int, most: int, least: int | None = None) -> Tensor | None:
    """A mask as bool, its shape checked: `[batch, least..most]`.

    None where all is real, which is faster. That takes a look at the device, so a compiled graph doesn't.
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
    """One layer of it, for one pass. Mechanisms take it as their cache, also in the model of someone else.

    Args:
        cache: What transformers hands on as `past_key_values`.
        index: Number of the layer.
    """

    def __init__(self, cache: TransformersCache, index: int) -> None:
        super().__init__()
        if is_static(cache):
            raise ValueError("a layer by itself takes a dynamic cache, not a static one")
        self.length = cache.get_seq_length(index)
        self._cache, self._index = cache, index

    def take(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Held:
        return Held(*self._cache.update(key, value, self._index), key_mask, None)


class FixedCache(Cache):
    """A `StaticCache`: tokens stand where they came, padding included, and only the device knows how many there are.

    So the mask is over slots, and the decoder isn't told of it. The first tokens of all are another matter: they need
    not look at what is free.
    """

    def __init__(self, cache: TransformersCache, n_layers: int, x: Tensor, attention_mask: Tensor | None) -> None:
        batch, new = x.shape[:2]
        capacity, start = cache.get_max_length(0), cache.get_seq_length()
        self.is_first = isinstance(start, int)  # nothing is allocated yet
        if x.device.type == "cpu" and not torch.compiler.is_compiling() and int(start) + new > capacity:
            raise ValueError(f"a static cache of {capacity:,} tokens can't take {new:,} more after {int(start):,}")
        slots = start + torch.arange(new, device=x.device)[None]  # not a view of the cache's own count, which moves on
        self.key_lengths = None if self.is_first else (slots[:, -1] + 1).expand(batch)
        self.places, self.key_mask = slots, real_keys(attention_mask, batch, capacity, new)
        if self.key_mask is not None:
            # Free slots are told by their number; a negative width cuts off those that the first tokens don't see.
            width = new if self.is_first else capacity
            self.key_mask = F.pad(self.key_mask, (0, width - self.key_mask.shape[1]), value=True)
            self.places = (self.key_mask.long().cumsum(-1) - 1).clamp(min=0).gather(1, slots.expand(batch, -1))
        self.layers = [FixedLayer(cache, index, self) for index in range(n_layers)]


class FixedLayer(LayerCache):
    """One layer of it."""

    def __init__(self, cache: TransformersCache, index: int, whole: FixedCache) -> None:
        super().__init__()
        self._cache, self._index, self._whole = cache, index, whole

    def places(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return self._whole.places

    def take(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Held:
        _check_no_grad(key, value)
        keys, values = self._cache.update(key, value, self._index)
        if self._whole.is_first:
            keys, values = (buffer[:, :, : key.shape[2]] for buffer in (keys, values))
        return Held(keys, values, self._whole.key_mask, self._whole.key_lengths)
