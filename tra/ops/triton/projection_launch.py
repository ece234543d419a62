"""Launches the kernels beside a layer's products: the norm, the forget gates, and the gradient of their bias."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.triton.backward import NormFactors
from tra.ops.triton.launch import device_guard, padded

BLOCK_TOKENS = 64
"""Tokens of a block of the norm, and of the gates."""
GATE_COLUMNS, MAX_GATE_HEADS = 64, 64
"""Columns of x that a block of the gates reads at once, and the most heads that it has."""
BIAS_TOKENS, MAX_BIAS_PROGRAMS = 128, 64
"""Tokens that are summed at once for the gates' bias, and how many programs share all of them."""


class Heads(NamedTuple):
    """Views of projections `[B, T, columns]`."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, Hkv, T, D]
    value: Tensor
    rest: Tensor  # [B, T, ...]: gates, and what fills up a row


def split_heads(packed: Tensor, n_heads: int, n_kv_heads: int, width: int) -> Heads:
    sizes = [n_heads * width, n_kv_heads * width, n_kv_heads * width]
    *heads, rest = packed.split([*sizes, packed.shape[2] - sum(sizes)], dim=2)
    query, key, value = (x.unflatten(2, (-1, width)).transpose(1, 2) for x in heads)
    return Heads(query, key, value, rest)


def empty_factors(x: Tensor, n_heads: int, n_kv_heads: int) -> NormFactors:
    batch, length, _ = x.shape
    return NormFactors(
        *(torch.empty(batch, heads, length, dtype=torch.float32, device=x.device) for heads in (n_heads, n_kv_heads))
    )


def normalise(packed: Tensor, n_heads: int, n_kv_heads: int, width: int, eps: float) -> NormFactors:
    """Normalise queries and keys of `[B, T, columns]` in place, and return what they were multiplied by."""
    from tra.ops.triton.projection_kernels import normalise_kernel

    batch, length, columns = packed.shape
    factors = empty_factors(packed, n_heads, n_kv_heads)
    blocks = -(-batch * length // BLOCK_TOKENS)
    with device_guard(packed.device):
        normalise_kernel[(blocks * (n_heads + n_kv_heads),)](
            packed, *factors, columns, batch * length, length, n_heads, n_kv_heads, eps,
            D=width, BD=padded(width), BM=BLOCK_TOKENS,
        )  # fmt: skip
    return factors


def gates(x: Tensor, gate: Tensor | None, gate_bias: Tensor | None, n_heads: int) -> Tensor:
    """Return log_forget `[B, H, T]`, in float32: log σ of the gates, or zeros without them."""
    batch, length, columns = x.shape
    if gate is None or gate_bias is None:
        return torch.zeros(batch, n_heads, length, device=x.device)
    from tra.ops.triton.projection_kernels import gate_kernel

    rows = x.reshape(-1, columns).contiguous()
    out = torch.empty(batch, n_heads, length, device=x.device)
    with device_guard(x.device):
        heads = min(MAX_GATE_HEADS, padded(n_heads))
        gate_kernel[(-(-len(rows) // BLOCK_TOKENS), -(-n_heads // heads))](
            rows, gate.contiguous(), gate_bias.contiguous(), out, len(rows), length, n_heads,
            C=columns, BC=min(GATE_COLUMNS, padded(columns)), BH=heads, BM=BLOCK_TOKENS,
        )  # fmt: skip
    return out


def bias_gradient(forget: Tensor) -> Tensor:
    """Return the gradient of the bias `[H]`, in float32, from that of the gates `[B, T, H]`."""
    from tra.ops.triton.projection_kernels import bias_kernel

    rows = forget.flatten(0, 1)
    n_rows, heads = rows.shape
    programs = min(MAX_BIAS_PROGRAMS, -(-n_rows // BIAS_TOKENS))
    sums = torch.empty(heads, programs, dtype=torch.float32, device=rows.device)
    with device_guard(rows.device):
        at_once = min(MAX_GATE_HEADS, padded(heads))
        bias_kernel[(programs, -(-heads // at_once))](
            rows, sums, rows.stride(0), n_rows, heads, BH=at_once, BM=BIAS_TOKENS
        )
    return sums.sum(1)
