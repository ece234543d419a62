"""What launches of the walk's kernels share."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

EARLY_ABOVE = 1024
"""Keys above which a walk is asked whether it may stop. Up to here asking costs more than what is left to read."""
SORTED = 1024
"""Programs: about twice as many as an H200 runs at once."""
LOG2_E = math.log2(math.e)


def online(dtype: torch.dtype, threshold: float, score_bound: float | None) -> bool:
    """Whether the softmax needs a running maximum: without a promised bound, or with one that is too far from it.

    With the bound as fixed reference a row's sum may be as small as exp(max(threshold, -bound) - bound); in float16
    weights that small vanish earlier, and float32 loses digits to a reference far above the logits.
    """
    if score_bound is None or dtype == torch.float32:
        return True
    span = score_bound - max(threshold, -score_bound)
    return span > (20.0 if dtype == torch.float16 else 60.0)


def steepest(dtype: torch.dtype) -> float:
    """The slope, in powers of two, beyond which a gate says nothing new where scores are bounded as `online` asks.

    It has to exceed the span of the scores (87 powers; 29 in float16) by more than any tolerance shows, and powers up
    to it, in float16 raised by 15, must not overflow.
    """
    return 105.0 if dtype == torch.float16 else 120.0


@lru_cache(maxsize=1024)
def together(heads: int, blocks: int, early: bool = False, least: int = 1) -> int:
    """How many heads' blocks are sorted by the length of their walks; a divisor of `heads`.

    The last programs to start are then short ones, and the processors end together. About SORTED programs are enough,
    which keeps these heads' keys in the cache; `least` heads are where their walks are long enough to share keys on the
    way. Of short sequences every program waits for memory, and a head's had better come together. Where walks may stop
    early it is all heads: a program that comes late is then one whose walk can't be long.
    """
    if early:
        return heads
    if blocks < 8:
        return 1
    wanted = max(least, -(-SORTED // blocks))
    divisors = [number for number in range(1, heads + 1) if heads % number == 0]
    return min(divisors, key=lambda number: max(number / wanted, wanted / number))


def padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whichever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def empty_out(query: Tensor, width: int) -> Tensor:
    """`[B, H, Tq, width]`, with heads beside each other in memory where the queries' are."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, width).transpose(1, 2)
    return query.new_empty(batch, heads, length, width)


def _empty_low(query: Tensor, width: int, training: bool) -> Tensor:
    """float32 is exact enough as it is."""
    return empty_out(query, width) if training and query.dtype != torch.float32 else query.new_empty(0)


def shape_options(query: Tensor, value: Tensor, first: Tensor | None, dropout: float) -> dict[str, Any]:
    return {
        "D": query.shape[3],
        "DV": value.shape[3],
        "BD": padded(query.shape[3]),
        "BDV": padded(value.shape[3]),
        "RANGES": first is not None,
        "DROPOUT": dropout > 0,
        "PRECISION": "ieee",  # of float32; half precision has no other
    }


def limit(registers: int) -> dict[str, int]:
    """Registers that a thread may have, as an option of a launch."""
    return {"maxnreg": registers} if registers and torch.version.hip is None else {}


def drop_arguments(dropout: float) -> tuple[int, float]:
    return int(dropout * 2**32), 1 / (1 - dropout)


class Made(NamedTuple):
    """What a forward pass leaves.

    Without its low part a rounded output would be felt in the gradients: backward subtracts two numbers that it nearly
    makes equal. It is empty where gradients aren't wanted.
    """

    out: Tensor  # [B, H, Tq, Dv]
    low: Tensor  # what rounding cut off it, or empty
    reference: Tensor  # of the weights, [B, H, Tq]
    total: Tensor  # their sum, where it isn't part of the reference
    stop: Tensor  # the oldest key each row read


def empty_made(query: Tensor, value: Tensor, training: bool) -> Made:
    reference, total = (query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2))
    return Made(
        empty_out(query, value.shape[3]),
        _empty_low(query, value.shape[3], training),
        reference,
        total,
        query.new_empty(query.shape[:3], dtype=torch.int32),
    )
