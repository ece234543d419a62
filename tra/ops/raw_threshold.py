"""The threshold of scaled scores as one of raw products."""

from __future__ import annotations

import math
import struct
from functools import lru_cache


@lru_cache(maxsize=64)
def cut(scale: float, threshold: float) -> float:
    """The largest float32 x with `x · scale <= threshold` in float32: `x <= cut` decides as the definition does."""
    scale, threshold = _float32(scale), _float32(threshold)
    low, high = _order(-math.inf), _order(math.inf)
    while low < high:  # the product is monotone in x
        middle = (low + high + 1) // 2
        if _float32(_unorder(middle) * scale) <= threshold:
            low = middle
        else:
            high = middle - 1
    return _unorder(low)


def _float32(x: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def _order(x: float) -> int:
    """float32 as integers in the same order."""
    bits: int = struct.unpack("<i", struct.pack("<f", x))[0]
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _unorder(number: int) -> float:
    bits = number if number >= 0 else -number | 0x80000000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
