"""Adapters that make transformers' caches, growing and static, caches of a decoder.

An adapter lives for one pass. Keys, values and lengths stay in transformers' own objects, so that beam search, cropping
and offloading work on all of them. What a mechanism keeps besides keys and values is in layers of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from tra.attention import MECHANISMS, BoundedCache, Cache, LayerCache
from tra.attention.shared.cache import CacheView, check_no_grad
from tra.hub._bounded_cache import TRABoundedCache
from tra.hub.config import TRAConfig


def adapt(
    cache: TransformersCache, config: TRAConfig, n_layers: int, x: Tensor, attention_mask: Tensor | None
) -> tuple[Cache | BoundedCache, Tensor | None]:
    """Return a decoder's cache around `cache` for new tokens x `[B, T, d_model]`, and the mask for the decoder."""
    if not isinstance(cache, TransformersCache):
        raise ValueError(f"past_key_values must be a Cache of transformers, got a {type(cache).__name__}")
    if isinstance(cache, TRABoundedCache):
        mask = real_keys(attention_mask, x.shape[0], cache.get_seq_length() + x.shape[1])
        return cache.bounded, mask
    if not is_static(cache):
        return GrowingCache(cache, n_layers), real_keys(attention_mask, x.shape[0], cache.get_seq_length() + x.shape[1])
    if not MECHANISMS[config.mechanism].takes_key_lengths:
        raise ValueError(f"{config.mechanism} can't use a static cache: generate with a dynamic one")
    return FixedCache(cache, n_layers, x, attention_mask), None


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
        # not the buffers of `LayerCache`: all tensors are in transformers' layer
        if is_static(cache):
            raise ValueError("a layer by itself takes a dynamic cache, not a static one")
        self.length = cache.get_seq_length(index)
        self._cache, self._index = cache, index

    def add(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> CacheView:
        return CacheView(*self._cache.update(key, value, self._index), key_mask, None)

    @property
    def state(self) -> dict[str, Tensor]:  # type: ignore[override]
        return self._extended_layer(lambda layer: bool(layer.state)).state

    def extend(self, name: str, new: Tensor) -> Tensor:
        layer = self._extended_layer(lambda layer: name in layer.numbers)
        if name in layer.numbers:
            self.check_batch(new.shape[0], layer.numbers[name])
            new = torch.cat([layer.numbers[name], new], dim=2)
        layer.numbers[name] = new
        return new

    def advance(self, tokens: int, **state: Tensor) -> None:
        self._extended_layer(lambda layer: bool(layer.state)).advance(tokens, state)
        self.length += tokens

    def _extended_layer(self, is_filled: Callable[[ExtendedLayer], bool]) -> ExtendedLayer:
        """Return the layer of transformers' cache, replaced by one that holds more than keys and values."""
        layers: list[Any] = self._cache.layers
        while len(layers) <= self._index:
            layers.append(DynamicLayer())
        layer = layers[self._index]
        if type(layer) is DynamicLayer:
            layer = layers[self._index] = ExtendedLayer.of(layer)
        if not isinstance(layer, ExtendedLayer):
            raise ValueError(
                f"the mechanism keeps more than keys and values, which a {type(layer).__name__} can't hold: generate "
                "with a DynamicCache"
            )
        if self.length and not is_filled(layer):
            raise ValueError("the cache was filled by another mechanism")
        return layer


class ExtendedLayer(DynamicLayer):
    """A layer of a `DynamicCache` with further tensors: numbers of each token, and states of all tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, Tensor] = {}
        """`[B, H, T]` each."""
        self.state: dict[str, Tensor] = {}
        """`[B, ...]` each."""
        self.tokens = 0
        """Number of tokens that stored a state and no keys."""

    @classmethod
    def of(cls, layer: DynamicLayer) -> ExtendedLayer:
        """Return a layer with the keys and values of another."""
        made = cls()
        vars(made).update(vars(layer))
        return made

    def advance(self, tokens: int, state: dict[str, Tensor]) -> None:
        """Count tokens that store a new state and no keys."""
        self.device = next(iter(state.values())).device
        self.state, self.tokens, self.is_initialized = state, self.tokens + tokens, True

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return not self.state

    def get_seq_length(self) -> int:
        return self.tokens if self.keys is None else super().get_seq_length()

    def reset(self) -> None:
        super().reset()
        self.numbers, self.state, self.tokens = {}, {}, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.state:
            raise ValueError("this mechanism's cache can't be cropped: its state is of all tokens so far")
        super().crop(tokens_to_remove)
        if tokens_to_remove:
            self.numbers = {name: x[..., :tokens_to_remove] for name, x in self.numbers.items()}

    def offload(self) -> None:
        self._change_all(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change_all(lambda x: x.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change_all(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_all(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_all(lambda x: x[indices, ...])

    def _change_all(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = change(self.keys), change(self.values)
        self.numbers = {name: change(x) for name, x in self.numbers.items()}
        self.state = {name: change(x) for name, x in self.state.items()}


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
