"""Which implementation takes which call: two tables, each read from the top until a row fits.

`api.py` reads AUTO, `triton/forward.py` reads WITHIN_TRITON. `README.md` has the same tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.compiler_workarounds import is_exporting
from tra.ops.forward_mode import in_forward_mode
from tra.ops.options import AttentionOptions
from tra.ops.triton.availability import why_unavailable

MAX_REFERENCE_KEYS = 512
"""Up to here the whole map is small, and fewer and larger calls are faster than a walk."""
MAX_NEWEST_FIRST_QUERIES = 16
"""More queries are a prompt, for which blocks of rows are faster."""
MAX_DECODE_QUERIES = 16
"""Per head. More are a prompt: neighbouring rows, which the forward kernel takes 64 at a time."""
MAX_DECODE_ROWS = 64
"""Queries times heads that share a key head: what one program holds. With more, forward blocks are full."""


class Call(NamedTuple):
    """The properties of a call on which a choice depends."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_forget: Tensor
    options: AttentionOptions

    @property
    def wants_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in self[:4])


class Choice(NamedTuple):
    """A row of a table."""

    implementation: str
    condition: str
    takes: Callable[[Call], bool]


def auto_takes_triton(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Say whether "auto" takes the kernels for heads of a width. AMD's GPUs are untested, so only by name."""
    if device.type != "cuda" or torch.version.hip is not None or why_unavailable(device, dtype, width):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def takes_newest_first(call: Call) -> bool:
    """Say whether a call suits `newest_first`, which asks the device how far to go and can't be differentiated."""
    few_on_cpu = call.query.device.type == "cpu" and call.query.shape[2] <= MAX_NEWEST_FIRST_QUERIES
    stops = call.options.score_bound is not None and call.options.tolerance > 0
    plain = call.options.dropout == 0 and not call.wants_gradients
    return few_on_cpu and not torch.compiler.is_compiling() and stops and plain


def decode_fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether the decode kernels can hold all queries of a key head, and copy rows four bytes at a time.

    For the latter see `compiler_workarounds.MAX_STRIDE_UNIT`.
    """
    heads, n_queries, width = query.shape[1:]
    if query.dtype != torch.float32 and (width % 2 or value.shape[3] % 2):
        return False
    return n_queries <= MAX_DECODE_QUERIES and n_queries * (heads // key.shape[1]) <= MAX_DECODE_ROWS


AUTO = (
    Choice(
        "reference",
        "forward-mode differentiation (`torch.func.jvp`), or a graph is exported, whose sizes are free",
        lambda _: in_forward_mode() or is_exporting(),
    ),
    Choice(
        "triton",
        "an NVIDIA GPU since Ampere; float16, bfloat16 or float32; heads at most 256 wide; Triton installed",
        lambda call: auto_takes_triton(
            call.query.device, call.query.dtype, max(call.query.shape[3], call.value.shape[3])
        ),
    ),
    Choice("reference", "at most 512 keys", lambda call: call.key.shape[2] <= MAX_REFERENCE_KEYS),
    Choice(
        "newest-first",
        "a CPU, not compiling; at most 16 queries; no gradients, no dropout; a score_bound, a tolerance above 0",
        takes_newest_first,
    ),
    Choice("blockwise", "every other call", lambda _: True),
)

WITHIN_TRITON = (
    Choice(
        "decode",
        "at most 16 queries, and 64 queries per key head; no gradients, no dropout; even widths or float32",
        lambda call: (
            not call.wants_gradients and call.options.dropout == 0 and decode_fits(call.query, call.key, call.value)
        ),
    ),
    Choice("forward", "every other call", lambda _: True),
)


def choose(table: tuple[Choice, ...], call: Call) -> str:
    """Return the implementation of the first row that takes the call."""
    for row in table:
        if row.takes(call):
            return row.implementation
    raise AssertionError("the last row of a table takes every call")
