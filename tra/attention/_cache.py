"""The growing KV cache: keys and values alone, whatever the mechanism."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, in buffers that double when full."""

    def __init__(self) -> None:
        self.length = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[B, Hkv, T, D]` and `[B, Hkv, T, Dv]`; gives back all keys and values so far."""
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError("a cache is for inference: gradients don't flow through it, so use torch.no_grad()")
        if self._key is not None and self._key.shape[0] != key.shape[0]:
            raise ValueError(f"the cache holds a batch of {self._key.shape[0]}, got one of {key.shape[0]}")
        self._key = self._fit(self._key, key)
        self._value = self._fit(self._value, value)
        self.length += key.shape[2]
        return self._key[:, :, : self.length], self._value[:, :, : self.length]

    def _fit(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        end = self.length + new.shape[2]
        if buffer is None or end > buffer.shape[2]:
            capacity = max(end, 2 * (0 if buffer is None else buffer.shape[2]))
            grown = new.new_zeros(new.shape[0], new.shape[1], capacity, new.shape[3])
            if buffer is not None:
                grown[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = grown
        buffer[:, :, self.length : end] = new
        return buffer


class Cache:
    """One `LayerCache` per layer of a decoder."""

    def __init__(self, n_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Tokens held, padding included."""
        return self.layers[0].length
