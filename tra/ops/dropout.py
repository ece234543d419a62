"""Counter-based dropout: whether a weight is dropped is a function of a seed and of its place.

Nothing is stored between forward and backward, and every implementation drops the same weights. The
mixing step is Chris Wellons' `lowbias32` (a 32-bit integer hash of low bias), here in int64 arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """A fresh seed from PyTorch's own generator, so that `torch.manual_seed` and checkpointing govern it."""
    return torch.randint(0, 1 << 31, (1,), device=device)


def keep_weights(seed: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """True where a weight stays.

    Args:
        seed: `[1]` int64.
        rows: `[...]` int64, the number of (batch, head, query) in row-major order.
        columns: `[K]`, or what broadcasts against `[..., K]`: int64, places of the keys among real keys.

    Returns:
        `[..., K]` bool, True with probability `1 - rate`.
    """
    # The seed goes in before any multiplication: compilers take arithmetic on bare indices for int32.
    row_seed = _mix(seed & _LOW)
    column_seed = _mix(row_seed ^ 0x5BD1E995)
    row_state = _mix(rows + row_seed & _LOW)
    column_state = (columns + column_seed) * 0x9E3779B9 & _LOW
    return _mix(row_state[..., None] ^ column_state) >= int(rate * 2**32)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ x >> 16) * 0x7FEB352D & _LOW
    x = (x ^ x >> 15) * 0x846CA68B & _LOW
    return x ^ x >> 16
