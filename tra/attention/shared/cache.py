"""KV caches, growing and static. Most mechanisms keep keys and values alone; some add a number per key, or a state.

A decoder calls `begin` before its layers run and `end` after. A layer asks its cache for the positions of the new
tokens, adds their keys and values, and receives all that are stored. Any object with these methods can be a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tra.attention.shared.positions import positions
from tra.ops.compiler_workarounds import is_exporting

if TYPE_CHECKING:
    from tra.attention.shared.pages import Pages, PagesByHead


class CacheView(NamedTuple):
    """The keys and values that a layer attends to, new tokens included. If they lie in pages, only the new ones."""

    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, Dv]
    key_mask: Tensor | None  # [B, Tk]
    key_lengths: Tensor | None  # [B]: slots in use, if not all are; the new tokens are the last of them
    pages: Pages | PagesByHead | None = None  # all keys and values, for mechanisms that have `takes_pages`


class LayerCache:
    """Keys and values of one layer, in buffers that double when full."""

    def __init__(self) -> None:
        self.length = 0
        self.state: dict[str, Tensor] = {}
        """Tensors `[B, ...]` that a mechanism carries from token to token."""
        self._buffers: dict[str, Tensor] = {}

    def positions(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Return the positions of the new tokens `[B, T, d_model]` among real ones, `[B or 1, T]`."""
        return positions(x, key_mask, self.length)

    def add(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> CacheView:
        """Add keys and values of the new tokens, which `key_mask` `[B, cached + T]` includes."""
        return CacheView(*self.append(key, value), key_mask, None)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append `[B, Hkv, T, D]` and `[B, Hkv, T, Dv]`, and return all keys and values so far."""
        for name, new in (("key", key), ("value", value)):  # before anything changes
            self._check(name, new)
        start, self.length = self.length, self.length + key.shape[2]
        return self._write("key", key, start), self._write("value", value, start)

    def extend(self, name: str, new: Tensor) -> Tensor:
        """Append numbers `[B, H, T]` of the tokens appended last, and return those of all tokens."""
        self._check(name, new)
        return self._write(name, new, self.length - new.shape[2])

    def advance(self, tokens: int, **state: Tensor) -> None:
        """Count tokens that store a new state and no keys."""
        check_no_grad(*state.values())
        self.length += tokens
        self.state |= state

    def check_batch(self, batch: int, stored: Tensor) -> None:
        """Raise a ValueError if `stored` is of another batch size."""
        if stored.shape[0] != batch:
            raise ValueError(f"the cache holds a batch of {stored.shape[0]}, got one of {batch}")

    def _check(self, name: str, new: Tensor) -> None:
        check_no_grad(new)
        buffer = self._buffers.get(name)
        if buffer is not None:
            self.check_batch(new.shape[0], buffer)
            if buffer.dtype != new.dtype:
                raise ValueError(f"the cache holds {buffer.dtype}, got {new.dtype}: use the same dtype")

    def _write(self, name: str, new: Tensor, start: int) -> Tensor:
        end, buffer = start + new.shape[2], self._buffers.get(name)
        if buffer is None or end > buffer.shape[2]:
            capacity = max(end, 2 * (0 if buffer is None else buffer.shape[2]))
            grown = new.new_zeros(*new.shape[:2], capacity, *new.shape[3:])
            if buffer is not None:
                grown[:, :, :start] = buffer[:, :, :start]
            self._buffers[name] = buffer = grown
        buffer[:, :, start:end] = new
        return buffer[:, :, :end]


def check_no_grad(*tensors: Tensor) -> None:
    """Raise a RuntimeError if a gradient would have to flow into a cache."""
    if torch.is_grad_enabled() and not is_exporting() and any(x.requires_grad for x in tensors):
        raise RuntimeError("a cache is for inference: gradients don't flow through it, so use torch.no_grad()")


class Cache:
    """One `LayerCache` per layer of a decoder. It grows with every token, padding included."""

    def __init__(self, n_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Tokens stored, padding included."""
        return self.layers[0].length

    def begin(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return new tokens `[B, T, d_model]` and their mask as the layers should receive them."""
        return x, key_mask

    def end(self, x: Tensor) -> Tensor:
        """Return the layers' output in the order of the tokens that `begin` received."""
        return x


class PackedRows:
    """Rows of real tokens without padding, the base of caches of a fixed size.

    Their lengths stay on the device, so that a step can be captured as a CUDA graph.
    """

    layers: Sequence[PackedLayer]

    def __init__(self) -> None:
        self.length = 0
        """Tokens received so far, padding included."""
        self.lengths: Tensor | None = None
        """`[B]`: real tokens stored, None before the first; `end` adds those of the current pass."""
        self.padded = False
        """Whether a mask was given, so that rows may differ in length."""

    def begin(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `Cache`. With padding, real tokens are moved last, as queries stand at the end of the keys."""
        batch, new = x.shape[:2]
        if self.lengths is None:
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=x.device)
        elif len(self.lengths) != batch:
            raise ValueError(f"the cache holds a batch of {len(self.lengths)}, got one of {batch}")
        self._order = None
        index = torch.arange(new, device=x.device).expand(batch, -1)
        real = torch.full_like(self.lengths, new)
        if key_mask is not None:
            self.padded = True
            is_real = key_mask[:, self.length :]
            real = is_real.sum(-1)
            self._order = is_real.int().argsort(dim=-1, stable=True)
            x = x.gather(1, self._order[..., None].expand_as(x))
        self.new_lengths = self.lengths + real
        self.new_positions = self.new_lengths[:, None] - new + index
        self.is_padding = index < (new - real)[:, None]
        return x, None

    def end(self, x: Tensor) -> Tensor:
        """See `Cache`."""
        assert self.lengths is not None
        self.length += x.shape[1]
        self.lengths.copy_(self.new_lengths)
        return x if self._order is None else torch.empty_like(x).scatter_(1, self._order[..., None].expand_as(x), x)


class StaticCache(PackedRows):
    """Keys and values in buffers of a fixed size: nothing is allocated per token, and lengths stay on the device.

    Padding isn't stored: the real tokens of every row fill the first slots.

    Args:
        n_layers: Layers of the decoder.
        capacity: Tokens that fit.
    """

    def __init__(self, n_layers: int, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a static cache's capacity must be at least 1, got {capacity}")
        super().__init__()
        self.capacity = capacity
        """Tokens that fit."""
        self.layers = [StaticLayerCache(self) for _ in range(n_layers)]

    def begin(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `PackedRows`."""
        if self.length + x.shape[1] > self.capacity:
            after = f" after {self.length:,}" if self.length else ""
            raise ValueError(f"a static cache of {self.capacity:,} tokens can't take {x.shape[1]:,} more{after}")
        found = super().begin(x, key_mask)
        self.slots = self.new_positions.masked_fill(self.is_padding, self.capacity)  # which is never read
        return found


class PackedLayer:
    """One layer of a cache of `PackedRows`."""

    def __init__(self, rows: PackedRows) -> None:
        self._rows = rows
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        return self._rows.length

    def positions(self, _x: Tensor, _key_mask: Tensor | None) -> Tensor:
        """Return `[B, T]`, 0 at padding, where it isn't used."""
        return self._rows.new_positions.clamp(min=0)

    def add(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> CacheView:
        """Store keys and values of the new tokens. See `LayerCache`."""
        raise NotImplementedError

    @staticmethod
    def check(buffer: Tensor, new: Tensor) -> None:
        """Raise an error if new keys or values can't go into a buffer."""
        check_no_grad(new)
        if buffer.dtype != new.dtype:
            raise ValueError(f"the cache holds {buffer.dtype}, got {new.dtype}: use the same dtype")


class StaticLayerCache(PackedLayer):
    """One layer of a `StaticCache`."""

    def __init__(self, cache: StaticCache) -> None:
        super().__init__(cache)
        self._cache = cache

    def add(self, key: Tensor, value: Tensor, _key_mask: Tensor | None) -> CacheView:
        """Write the new keys and values to their slots. Free slots hold zeros."""
        if self._buffers is None:
            self._buffers = self._empty_slots(key), self._empty_slots(value)
        slots = self._cache.slots[:, None, :, None]
        for buffer, new in zip(self._buffers, (key, value), strict=True):
            self.check(buffer, new)
            buffer.scatter_(2, slots.expand_as(new), new)
        if key.shape[2] == 1:  # a decoding step: its shapes must not change
            keys, values = (buffer[:, :, : self._cache.capacity] for buffer in self._buffers)
            return CacheView(keys, values, None, self._cache.new_lengths)
        end = self.length + key.shape[2]  # a prompt skips free slots, and needs lengths only if rows differ
        keys, values = (buffer[:, :, :end] for buffer in self._buffers)
        return CacheView(keys, values, None, self._cache.new_lengths if self._cache.padded else None)

    def _empty_slots(self, new: Tensor) -> Tensor:
        """Return zeros `[B, H, capacity + 1, D]`, in memory with all heads of a token side by side.

        The newest keys, which are all that forgetful heads read, then lie together and not on a page per head.
        """
        batch, heads, _, width = new.shape
        return new.new_zeros(batch, self._cache.capacity + 1, heads, width).transpose(1, 2)
