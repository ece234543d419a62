"""The growing KV cache. Most mechanisms keep keys and values alone; some add a number per key, or a state."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, in buffers that double when full."""

    def __init__(self) -> None:
        self.length = 0
        self.state: dict[str, Tensor] = {}
        """What a mechanism carries from token to token."""
        self._buffers: dict[str, Tensor] = {}

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[B, Hkv, T, D]` and `[B, Hkv, T, Dv]`; gives back all keys and values so far."""
        for name, new in (("key", key), ("value", value)):  # before anything changes
            self._check(name, new)
        start, self.length = self.length, self.length + key.shape[2]
        return self._fit("key", key, start), self._fit("value", value, start)

    def extend(self, name: str, new: Tensor) -> Tensor:
        """Add `[B, H, T]` numbers of the tokens appended last; gives back those of all."""
        self._check(name, new)
        return self._fit(name, new, self.length - new.shape[2])

    def advance(self, tokens: int, **state: Tensor) -> None:
        """Count tokens that leave nothing but a new state."""
        _check_no_grad(*state.values())
        self.length += tokens
        self.state |= state

    def check_batch(self, batch: int, held: Tensor) -> None:
        if held.shape[0] != batch:
            raise ValueError(f"the cache holds a batch of {held.shape[0]}, got one of {batch}")

    def _check(self, name: str, new: Tensor) -> None:
        _check_no_grad(new)
        buffer = self._buffers.get(name)
        if buffer is not None:
            self.check_batch(new.shape[0], buffer)
            if buffer.dtype != new.dtype:
                raise ValueError(f"the cache holds {buffer.dtype}, got {new.dtype}: decode as it was filled")

    def _fit(self, name: str, new: Tensor, start: int) -> Tensor:
        end, buffer = start + new.shape[2], self._buffers.get(name)
        if buffer is None or end > buffer.shape[2]:
            capacity = max(end, 2 * (0 if buffer is None else buffer.shape[2]))
            grown = new.new_zeros(*new.shape[:2], capacity, *new.shape[3:])
            if buffer is not None:
                grown[:, :, :start] = buffer[:, :, :start]
            self._buffers[name] = buffer = grown
        buffer[:, :, start:end] = new
        return buffer[:, :, :end]


def _check_no_grad(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError("a cache is for inference: gradients don't flow through it, so use torch.no_grad()")


class Cache:
    """One `LayerCache` per layer of a decoder."""

    def __init__(self, n_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Tokens held, padding included."""
        return self.layers[0].length
