"""The threshold of scaled scores as a threshold of raw products q·k."""

from __future__ import annotations

import math
import struct
from functools import lru_cache


@lru_cache(maxsize=64)
def raw_threshold(scale: float, threshold: float) -> float:
    """Return the largest float32 x with `x · scale <= threshold` in float32.

    `x <= raw_threshold` then decides as the definition does, in one comparison.
    """
    scale, threshold = _float32(scale), _float32(threshold)
    low, high = _float_to_order(-math.inf), _float_to_order(math.inf)
    while low < high:  # the product is monotone in x
        middle = (low + high + 1) // 2
        if _float32(_order_to_float(middle) * scale) <= threshold:
            low = middle
        else:
            high = middle - 1
    return _order_to_float(low)


def _float32(x: float) -> float:
    """Round to float32."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def _float_to_order(x: float) -> int:
    """Return an integer for a float32, in the same order."""
    bits: int = struct.unpack("<i", struct.pack("<f", x))[0]
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _order_to_float(number: int) -> float:
    """Return the float32 of such an integer."""
    bits = number if number >= 0 else -number | 0x80000000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
