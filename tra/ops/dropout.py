"""Counter-based dropout: whether a weight is dropped is a function of a seed, its row and its key.

Nothing is stored between forward and backward, and every implementation drops the same weights. The hash is Chris
Wellons' `lowbias32` (a 32-bit integer hash of low bias), here in int64 arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32_BITS = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """Return a seed from PyTorch's own generator, so that `torch.manual_seed` and checkpointing determine it."""
    return torch.randint(0, 1 << 31, (1,), device=device)


def keep_weights(seed: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return True where a weight stays.

    Args:
        seed: `[1]` int64.
        rows: `[...]` int64, the number of (batch, head, query) in row-major order.
        columns: `[K]`, or what broadcasts against `[..., K]`: int64, numbers of the keys among real keys.

    Returns:
        `[..., K]` bool, True with probability `1 - rate`.
    """
    # The seed is added before any multiplication, see `compiler_workarounds.py`, entry 3.
    row_seed = _hash32(seed & _LOW_32_BITS)
    column_seed = _hash32(row_seed ^ 0x5BD1E995)
    row_state = _hash32(rows + row_seed & _LOW_32_BITS)
    column_state = (columns + column_seed) * 0x9E3779B9 & _LOW_32_BITS
    return _hash32(row_state[..., None] ^ column_state) >= int(rate * 2**32)


def _hash32(x: Tensor) -> Tensor:
    x = (x ^ x >> 16) * 0x7FEB352D & _LOW_32_BITS
    x = (x ^ x >> 15) * 0x846CA68B & _LOW_32_BITS
    return x ^ x >> 16
