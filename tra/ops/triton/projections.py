"""A layer's projections, norm and attention as one operator, for training.

Queries, keys and values are one product, and so are their gradients, which the kernels write side by side, with the
gates' next to them. The norm is taken in place, as only the operator sees what it normalises; its gradient, where the
kernels have it in registers. Gates are worked out in float32; their gradients, in the precision of the other products:
in float16 they need a scaled loss, as all do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.ops.dropout import draw_seed
from tra.ops.inputs import check_options, default_tolerance, without_autocast
from tra.ops.triton import launch as _launch
from tra.ops.triton.backward import Gradients, run_backward
from tra.ops.triton.forward import is_the_best_choice, why_not
from tra.ops.triton.launch import Made, empty_made, on, padded

ROWS = 64
"""Tokens of a block of the norm, and of the gates."""
GATE_COLUMNS, GATE_HEADS = 64, 64
"""Columns of x that a block of the gates reads at once, and the heads that it has at most."""
BIAS_ROWS, BIAS_PROGRAMS = 128, 64
"""Tokens that are summed at once for the gates' bias, and how many programs share the others."""
UNIT = 16
"""Rows of gradients are a multiple of this many numbers, for aligned copies."""


class Weights(NamedTuple):
    """Of a layer's projections, as `nn.Linear` has them: `[heads · D, d_model]`, gates `[H, d_model]` and `[H]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None = None
    gate_bias: Tensor | None = None


def takes_projections(device: torch.device, dtype: torch.dtype, width: int, impl: str) -> bool:
    """Whether `attention_of_projections` can be had: it is the kernels' alone."""
    if impl == "auto":
        return is_the_best_choice(device, dtype, width)
    return impl == "triton" and why_not(device, dtype, width) is None


def attention_of_projections(
    x: Tensor,
    weights: Weights,
    *,
    n_heads: int,
    eps: float,
    threshold: float = 0.0,
    score_bound: float | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
) -> Tensor:
    """`threshold_relative_attention` of what a layer projects x to, queries and keys over their root mean square.

    Args:
        x: `[B, T, d_model]`, in the dtype to compute in.
        weights: Cast to that dtype, but for gates, which are worked out in float32. Without them distance is free.
        eps: Of the norm.

    The other arguments are those of `threshold_relative_attention`.

    Returns:
        `[B, H, T, D]`.
    """
    if x.numel() == 0:
        raise ValueError(f"x is empty: got shape {tuple(x.shape)}, expected every dimension to be at least 1")
    width = weights.query.shape[0] // n_heads
    check_options(width**-0.5, threshold, score_bound, dropout, tolerance)
    seed = draw_seed(x.device) if dropout > 0 else None
    tolerance = default_tolerance(x.dtype) if tolerance is None else tolerance
    if x.shape[1] <= _launch.EARLY_ABOVE:
        tolerance = 0.0
    joint = torch.cat([weight for weight in weights[:4] if weight is not None])
    if len(joint) % UNIT:
        joint = F.pad(joint, (0, 0, 0, -len(joint) % UNIT))
    joint = joint.to(x.dtype)
    gate = None if weights.gate is None else weights.gate.detach()  # whose gradient is part of the joint one's
    with without_autocast(x.device):
        return torch.ops.tra.projected_forward(
            x, joint, gate, weights.gate_bias, seed, n_heads, weights.key.shape[0] // width, width, eps,
            threshold, score_bound, dropout, tolerance,
        )[0]  # fmt: skip


class _Heads(NamedTuple):
    """Views of projections `[B, T, columns]`."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, Hkv, T, D]
    value: Tensor
    rest: Tensor  # [B, T, ...]: gates, and what fills up a row


def _heads(packed: Tensor, n_heads: int, n_kv_heads: int, width: int) -> _Heads:
    sizes = [n_heads * width, n_kv_heads * width, n_kv_heads * width]
    *heads, rest = packed.split([*sizes, packed.shape[2] - sum(sizes)], dim=2)
    query, key, value = (x.unflatten(2, (-1, width)).transpose(1, 2) for x in heads)
    return _Heads(query, key, value, rest)


def _empty_factors(x: Tensor, n_heads: int, n_kv_heads: int) -> tuple[Tensor, Tensor]:
    batch, length, _ = x.shape
    of_query, of_key = (
        torch.empty(batch, heads, length, dtype=torch.float32, device=x.device) for heads in (n_heads, n_kv_heads)
    )
    return of_query, of_key


def _normalise(packed: Tensor, n_heads: int, n_kv_heads: int, width: int, eps: float) -> tuple[Tensor, Tensor]:
    """In place; returns what queries and keys were multiplied by."""
    from tra.ops.triton.projection_kernels import normalise_kernel

    batch, length, columns = packed.shape
    factors = _empty_factors(packed, n_heads, n_kv_heads)
    blocks = -(-batch * length // ROWS)
    with on(packed.device):
        normalise_kernel[(blocks * (n_heads + n_kv_heads),)](
            packed, *factors, columns, batch * length, length, n_heads, n_kv_heads, eps,
            D=width, BD=padded(width), BM=ROWS,
        )  # fmt: skip
    return factors


def _log_forget(x: Tensor, gate: Tensor | None, gate_bias: Tensor | None, n_heads: int) -> Tensor:
    """`[B, H, T]`."""
    batch, length, columns = x.shape
    if gate is None or gate_bias is None:
        return torch.zeros(batch, n_heads, length, device=x.device)
    from tra.ops.triton.projection_kernels import gate_kernel

    rows = x.reshape(-1, columns).contiguous()
    out = torch.empty(batch, n_heads, length, device=x.device)
    with on(x.device):
        heads = min(GATE_HEADS, padded(n_heads))
        gate_kernel[(-(-len(rows) // ROWS), -(-n_heads // heads))](
            rows, gate.contiguous(), gate_bias.contiguous(), out, len(rows), length, n_heads,
            C=columns, BC=min(GATE_COLUMNS, padded(columns)), BH=heads, BM=ROWS,
        )  # fmt: skip
    return out


def _bias_gradient(forget: Tensor) -> Tensor:
    """`[H]` from that of gates, `[B, T, H]`, in float32."""
    from tra.ops.triton.projection_kernels import bias_kernel

    rows = forget.flatten(0, 1)
    n_rows, heads = rows.shape
    programs = min(BIAS_PROGRAMS, -(-n_rows // BIAS_ROWS))
    sums = torch.empty(heads, programs, dtype=torch.float32, device=rows.device)
    with on(rows.device):
        at_once = min(GATE_HEADS, padded(heads))
        bias_kernel[(programs, -(-heads // at_once))](
            rows, sums, rows.stride(0), n_rows, heads, BH=at_once, BM=BIAS_ROWS
        )
    return sums.sum(1)


@torch.library.custom_op("tra::projected_forward", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    gate_bias: Tensor | None,
    seed: Tensor | None,
    n_heads: int,
    n_kv_heads: int,
    width: int,
    eps: float,
    threshold: float,
    score_bound: float | None,
    dropout: float,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `Made`; log_forget; what was projected, `[B, T, columns]`, normalised; by which factors.

    `weight` has queries, keys, values, `gate` again, and zeros.
    """
    log_forget = _log_forget(x, gate, gate_bias, n_heads)
    packed = F.linear(x, weight[: (n_heads + 2 * n_kv_heads) * width])
    factors = _normalise(packed, n_heads, n_kv_heads, width, eps)
    made = torch.ops.tra.fused_forward(
        *_heads(packed, n_heads, n_kv_heads, width)[:3], log_forget, None, None, seed, width**-0.5, threshold,
        score_bound, dropout, tolerance, True,
    )  # fmt: skip
    return *made, log_forget, packed, *factors


@_forward.register_fake
def _(x, weight, _gate, _gate_bias, _seed, n_heads, n_kv_heads, width, *_):  # type: ignore[no-untyped-def]
    packed = x.new_empty(*x.shape[:2], (n_heads + 2 * n_kv_heads) * width)
    heads = _heads(packed, n_heads, n_kv_heads, width)
    made = empty_made(heads.query, heads.value, training=True)
    log_forget = torch.empty(x.shape[0], n_heads, x.shape[1], device=x.device)
    return *made, log_forget, packed, *_empty_factors(x, n_heads, n_kv_heads)


@torch.library.custom_op("tra::projected_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    out: Tensor,
    low: Tensor,
    reference: Tensor,
    total: Tensor,
    stop: Tensor,
    log_forget: Tensor,
    packed: Tensor,
    query_factor: Tensor,
    key_factor: Tensor,
    n_heads: int,
    n_kv_heads: int,
    width: int,
    threshold: float,
    score_bound: float | None,
    dropout: float,
    early: bool,
    gated: bool,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, the weights, and the gates' bias; of x and the weights empty where nobody asks."""
    grads = x.new_empty(*x.shape[:2], len(weight))
    query, key, value, rest = _heads(grads, n_heads, n_kv_heads, width)
    forget = rest[..., :n_heads].transpose(1, 2) if gated else torch.empty_like(log_forget)
    rest[..., n_heads if gated else 0 :].zero_()
    inputs = _heads(packed, n_heads, n_kv_heads, width)[:3]
    made = Made(out, low, reference, total, stop)
    run_backward(
        Gradients(query, key, value, forget), grad_out, *inputs, log_forget, None, None, seed, made,
        width**-0.5, threshold, score_bound, dropout, early, (query_factor, key_factor),
    )  # fmt: skip
    bias = _bias_gradient(rest[..., :n_heads]) if gated else log_forget.new_empty(n_heads)
    grad_x = grads @ weight if of_x else x.new_empty(0)
    grad_weight = grads.flatten(0, 1).T @ x.flatten(0, 1) if of_weight else weight.new_empty(0)
    return grad_x, grad_weight, bias


@_backward.register_fake
def _(grad_out, x, weight, _seed, *rest):  # type: ignore[no-untyped-def]
    of_x, of_weight = rest[-2:]
    grad_x, grad_weight = x.new_empty(x.shape if of_x else 0), weight.new_empty(weight.shape if of_weight else 0)
    return grad_x, grad_weight, x.new_empty(rest[9], dtype=torch.float32)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, _gate, gate_bias, seed, n_heads, n_kv_heads, width, _eps, *numbers, tolerance = inputs
    ctx.set_materialize_grads(False)  # of what nobody but backward sees
    ctx.save_for_backward(x, weight, seed, *output)
    ctx.bias = None if gate_bias is None else gate_bias.dtype
    ctx.options = (n_heads, n_kv_heads, width, *numbers, tolerance > 0, gate_bias is not None)


def _autograd(ctx, grad_out, *_grads_of_the_rest):  # type: ignore[no-untyped-def]
    with without_autocast(grad_out.device):
        of_x, of_weight, _, of_bias, *_ = ctx.needs_input_grad
        grad_x, grad_weight, grad_bias = torch.ops.tra.projected_backward(
            grad_out, *ctx.saved_tensors, *ctx.options, of_x, of_weight
        )
    return (
        grad_x if of_x else None,
        grad_weight if of_weight else None,
        None,
        grad_bias.to(ctx.bias) if of_bias else None,
        *(None,) * 9,
    )


_forward.register_autograd(_autograd, setup_context=_setup_context)
