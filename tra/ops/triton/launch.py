"""Helpers that the launchers of the kernels share."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tra.ops.options import AttentionOptions
from tra.ops.raw_threshold import raw_threshold

MAX_FULL_WALK_KEYS = 1024
"""Keys up to which every walk reads all of them: checking the bound would cost more than it saves."""
SORTED_PROGRAMS = 1024
"""Programs sorted together by the length of their walks: about twice as many as an H200 runs at once."""
LOG2_E = math.log2(math.e)


class ForwardState(NamedTuple):
    """The results of a forward pass that backward needs.

    Backward subtracts two nearly equal numbers, so without `out_error` the rounding of the output would show in the
    gradients.
    """

    out: Tensor  # [B, H, Tq, Dv]
    out_error: Tensor  # what rounding removed from it; empty in float32 and where gradients aren't wanted
    reference: Tensor  # of the weights, [B, H, Tq]
    total: Tensor  # their sum, where it isn't part of the reference
    stop: Tensor  # the oldest key each row read


def empty_forward_state(query: Tensor, value: Tensor, training: bool) -> ForwardState:
    width = value.shape[3]
    keep_error = training and query.dtype != torch.float32
    reference, total = (query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2))
    return ForwardState(
        empty_out(query, width),
        empty_out(query, width) if keep_error else query.new_empty(0),
        reference,
        total,
        query.new_empty(query.shape[:3], dtype=torch.int32),
    )


def empty_out(query: Tensor, width: int) -> Tensor:
    """Return `[B, H, Tq, width]`, with heads beside each other in memory where the queries' are."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, width).transpose(1, 2)
    return query.new_empty(batch, heads, length, width)


def out_strides(query: Tensor, width: int) -> tuple[int, int, int, int]:
    """Return the strides of `empty_out`."""
    _, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return length * heads * width, width, heads * width, 1
    return heads * length * width, length * width, width, 1


def needs_running_maximum(dtype: torch.dtype, options: AttentionOptions) -> bool:
    """Return whether the softmax needs a running maximum: without a promised bound, or with one far from the scores.

    With the bound as fixed reference a row's sum may be as small as exp(max(lower_cut, -bound) - bound); in float16
    weights that small vanish earlier, and float32 loses digits to a reference far above the logits.
    """
    if options.score_bound is None or dtype == torch.float32:
        return True
    span = options.score_bound - max(options.lower_cut, -options.score_bound)
    return span > (20.0 if dtype == torch.float16 else 60.0)


def steepest_slope(dtype: torch.dtype) -> float:
    """Return the slope, in powers of two, beyond which steeper gates give the same result without a running maximum.

    It exceeds the span of the scores (87 powers; 29 in float16) by more than any tolerance shows, and powers up to it,
    in float16 raised by 15, don't overflow.
    """
    return 105.0 if dtype == torch.float16 else 120.0


@lru_cache(maxsize=1024)
def heads_sorted_together(heads: int, blocks: int, early: bool = False, min_heads: int = 1) -> int:
    """Return for how many heads at a time blocks are sorted by the length of their walks; a divisor of `heads`.

    The last programs to start are then short, so all processors end at nearly the same time. About SORTED_PROGRAMS
    programs are enough, and keep the keys of these heads in the cache. `min_heads` is for walks long enough to share
    keys on the way. In short sequences every program waits for memory, and the blocks of a head should be neighbours.
    Where walks may stop early, all heads are sorted: the programs that start last then can't have long walks.
    """
    if early:
        return heads
    if blocks < 8:
        return 1
    wanted = max(min_heads, -(-SORTED_PROGRAMS // blocks))
    divisors = [number for number in range(1, heads + 1) if heads % number == 0]
    return min(divisors, key=lambda number: max(number / wanted, wanted / number))


def margin_kind(options: AttentionOptions) -> int:
    """Return the kernels' MARGIN: none, a finite one, or an infinite one."""
    return 0 if not options.has_margin else 2 if options.lower_cut == -math.inf else 1


def cuts(options: AttentionOptions) -> tuple[float, float]:
    """Return the products q·k above which a key counts and above which it stays."""
    return raw_threshold(options.scale, options.threshold), raw_threshold(options.scale, options.lower_cut)


def padded(width: int) -> int:
    """Return the power of two that a block's columns are padded to."""
    return max(16, power_of_two(width))


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()


def logit_unit(dtype: torch.dtype) -> float:
    """Return the unit of logits: 1, or log2 e in half precision, whose weights are powers of two."""
    return 1.0 if dtype == torch.float32 else LOG2_E


def rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with the device as the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def kernel_constants(query: Tensor, value: Tensor, first: Tensor | None, options: AttentionOptions) -> dict[str, Any]:
    """Return the kernels' constants that follow from shapes, dtype and options."""
    return {
        "D": query.shape[3],
        "DV": value.shape[3],
        "BD": padded(query.shape[3]),
        "BDV": padded(value.shape[3]),
        "RANGES": first is not None,
        "DROPOUT": options.dropout > 0,
        "MARGIN": margin_kind(options),
        "FLOAT32": query.dtype == torch.float32,
        "PRECISION": "ieee",  # of float32; half precision has no other
    }


def register_limit(registers: int) -> dict[str, int]:
    """Return the registers that a thread may have, as an option of a launch."""
    return {"maxnreg": registers} if registers and torch.version.hip is None else {}


def drop_arguments(dropout: float) -> tuple[int, float]:
    """Return the hash below which a weight is dropped, and the factor on the others."""
    return int(dropout * 2**32), 1 / (1 - dropout)
