"""A layer's projections, norm and attention as one operator, for training.

Queries, keys and values are one product. Their gradients are one matrix, which the kernels write, with the gradients of
the gates next to them. The norm is taken in place, as only the operator reads what it normalises; its gradient is taken
where the kernels have it in registers. Gates are computed in float32. Their gradients have the precision of the other
products: in float16 they need a scaled loss, as all do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.ops import choice
from tra.ops.dropout import draw_seed
from tra.ops.inputs import without_autocast
from tra.ops.options import AttentionOptions
from tra.ops.triton import (
    forward,  # noqa: F401 registers its operator
    launch,
)
from tra.ops.triton.availability import why_unavailable
from tra.ops.triton.backward import Gradients, NormFactors, run_backward
from tra.ops.triton.launch import ForwardState, empty_forward_state
from tra.ops.triton.projection_launch import bias_gradient, empty_factors, gates, normalise, split_heads

ROW_MULTIPLE = 16
"""Rows of gradients are a multiple of this many numbers, for aligned copies."""


class Weights(NamedTuple):
    """Weights of a layer's projections, as in `nn.Linear`: `[heads · D, d_model]`; gates `[H, d_model]` and `[H]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None = None
    gate_bias: Tensor | None = None


def takes_projections(device: torch.device, dtype: torch.dtype, width: int, impl: str) -> bool:
    """Return whether an `impl` has `attention_of_projections`: only the kernels do."""
    if impl == "auto":
        return choice.auto_takes_triton(device, dtype, width)
    return impl == "triton" and why_unavailable(device, dtype, width) is None


def attention_of_projections(
    x: Tensor,
    weights: Weights,
    *,
    n_heads: int,
    eps: float,
    threshold: float = 0.0,
    margin: float = 0.0,
    score_bound: float | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
) -> Tensor:
    """Project x, normalise queries and keys by their root mean square, and return `threshold_relative_attention`.

    Args:
        x: `[B, T, d_model]`, in the dtype to compute in.
        weights: Cast to that dtype, except gates, which are computed in float32. Without gates distance is free.
        eps: Epsilon of the norm.

    The other arguments are those of `threshold_relative_attention`.

    Returns:
        `[B, H, T, D]`.
    """
    if x.numel() == 0:
        raise ValueError(f"x is empty: got shape {tuple(x.shape)}, expected every dimension to be at least 1")
    width = weights.query.shape[0] // n_heads
    options = AttentionOptions.resolve(width, x.dtype, None, threshold, score_bound, dropout, tolerance, margin)
    seed = draw_seed(x.device) if dropout > 0 else None
    joint = torch.cat([weight for weight in weights[:4] if weight is not None])
    if len(joint) % ROW_MULTIPLE:
        joint = F.pad(joint, (0, 0, 0, -len(joint) % ROW_MULTIPLE))
    joint = joint.to(x.dtype)
    gate = None if weights.gate is None else weights.gate.detach()  # its gradient is part of the joint weights'
    with without_autocast(x.device):
        return torch.ops.tra.projected_forward(
            x, joint, gate, weights.gate_bias, seed, n_heads, weights.key.shape[0] // width, width, eps,
            options.threshold, options.margin, options.score_bound, options.dropout,
            options.tolerance if x.shape[1] > launch.MAX_FULL_WALK_KEYS else 0.0,
        )[0]  # fmt: skip


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
    margin: float,
    score_bound: float | None,
    dropout: float,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a `ForwardState`; log_forget; the projections `[B, T, columns]`, normalised; and `NormFactors`.

    `weight` has the weights of queries, keys, values, `gate` again, and zeros.
    """
    log_forget = gates(x, gate, gate_bias, n_heads)
    packed = F.linear(x, weight[: (n_heads + 2 * n_kv_heads) * width])
    factors = normalise(packed, n_heads, n_kv_heads, width, eps)
    state = torch.ops.tra.fused_forward(
        *split_heads(packed, n_heads, n_kv_heads, width)[:3], log_forget, None, None, seed, width**-0.5, threshold,
        margin, score_bound, dropout, tolerance, True,
    )  # fmt: skip
    return *state, log_forget, packed, *factors


@_forward.register_fake
def _(x, weight, _gate, _gate_bias, _seed, n_heads, n_kv_heads, width, *_):  # type: ignore[no-untyped-def]
    packed = x.new_empty(*x.shape[:2], (n_heads + 2 * n_kv_heads) * width)
    heads = split_heads(packed, n_heads, n_kv_heads, width)
    state = empty_forward_state(heads.query, heads.value, training=True)
    log_forget = torch.empty(x.shape[0], n_heads, x.shape[1], device=x.device)
    return *state, log_forget, packed, *empty_factors(x, n_heads, n_kv_heads)


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
    margin: float,
    score_bound: float | None,
    dropout: float,
    early: bool,
    gated: bool,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of x, the weights, and the gates' bias. Without `of_x` or `of_weight` that one is empty."""
    grads = x.new_empty(*x.shape[:2], len(weight))
    query, key, value, rest = split_heads(grads, n_heads, n_kv_heads, width)
    forget = rest[..., :n_heads].transpose(1, 2) if gated else torch.empty_like(log_forget)
    rest[..., n_heads if gated else 0 :].zero_()
    inputs = split_heads(packed, n_heads, n_kv_heads, width)[:3]
    options = AttentionOptions(width**-0.5, threshold, score_bound, dropout, margin=margin)
    state = ForwardState(out, low, reference, total, stop)
    run_backward(
        Gradients(query, key, value, forget), grad_out, *inputs, log_forget, None, None, seed, state,
        options, early, NormFactors(query_factor, key_factor),
    )  # fmt: skip
    bias = bias_gradient(rest[..., :n_heads]) if gated else log_forget.new_empty(n_heads)
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
    ctx.set_materialize_grads(False)  # of outputs that only backward reads
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
        *(None,) * 10,
    )


_forward.register_autograd(_autograd, setup_context=_setup_context)
