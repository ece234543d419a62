"""Launches the forward kernel, as an operator. Few queries go to `decode.py` instead.

Triton is imported at the first call, so that the package works without it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tra.ops import choice
from tra.ops.forward_mode import refuse_forward_mode
from tra.ops.inputs import without_autocast
from tra.ops.options import AttentionOptions
from tra.ops.stop_bound import OlderKeys
from tra.ops.triton import (
    backward,  # noqa: F401 registers its operator
    block_shapes,
    decode,  # noqa: F401 registers its operator
    launch,
)
from tra.ops.triton.availability import why_unavailable
from tra.ops.triton.direct_launch import TRITON, Launcher
from tra.ops.triton.launch import (
    ForwardState,
    device_guard,
    empty_forward_state,
    heads_sorted_together,
    rows_contiguous,
)
from tra.ops.visible import Visible, without_padding


def triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    visible: Visible | None,
    options: AttentionOptions,
    seed: Tensor | None,
) -> Tensor:
    """Return the reference's result up to rounding and `tolerance`. `visible` is None for plain causal order."""
    check_availability(query, value)
    call = choice.Call(query, key, value, log_forget, options)
    decoding = choice.choose(choice.WITHIN_TRITON, call) == "decode"
    first, last, key_mask = visible or (None, None, None)
    if first is not None and last is not None:
        if key_mask is not None and not decoding:
            key, value, first, last = without_padding(key, value, first, last, key_mask)
        last = last.clamp(max=key.shape[2] - 1)  # lengths on a GPU aren't checked: no key beyond may be read
        first, last = (x.to(torch.int32).contiguous() for x in (first, last))
    if options.scale < 0:  # the kernels take a positive one
        query = -query
    numbers = (abs(options.scale), options.threshold, options.margin, options.score_bound)
    if decoding:
        return torch.ops.tra.decode(query, key, value, log_forget, first, last, key_mask, *numbers, options.tolerance)
    tolerance = options.tolerance if key.shape[2] > launch.MAX_FULL_WALK_KEYS else 0.0
    return torch.ops.tra.fused_forward(
        query, key, value, log_forget, first, last, seed, *numbers, options.dropout, tolerance, call.wants_gradients
    )[0]


def check_availability(query: Tensor, value: Tensor) -> None:
    """Raise a RuntimeError if the kernels can't take such inputs here, or forward mode is on."""
    reason = why_unavailable(query.device, query.dtype, max(query.shape[3], value.shape[3]))
    if reason is not None:
        raise RuntimeError(f"impl='triton' is not available: {reason}")
    refuse_forward_mode("impl='triton'")


def _longest_keys(key: Tensor) -> Tensor:
    """Return the largest norm of each key head, `[B, Hkv]`; in float64, as squares of small float32 numbers are 0."""
    at_once = max(1, 2**24 // (key.shape[0] * key.shape[1] * key.shape[3]))  # 128 MiB
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64).amax(-1) for part in key.split(at_once, 2)]
    return torch.stack(norms).amax(0).float()


def run_forward(
    state: ForwardState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    seed: Tensor | None,
    options: AttentionOptions,
    launcher: Launcher = TRITON,
    older: OlderKeys | None = None,
    counted: Tensor | None = None,
) -> None:
    """Fill `state` and, if these keys are a piece of a row's keys, the number of `counted` keys `[B, H, Tq]`.

    Args:
        older: The keys of the rows that other calls read, in float32; with `counted`.
    """
    from tra.ops.triton.forward_kernel import forward_kernel

    batch, heads, n_queries, width = query.shape
    kv_heads, n_keys = key.shape[1:3]
    early = options.tolerance > 0
    norms = early and options.score_bound is None
    unit = launch.logit_unit(query.dtype)
    longest_key = state.reference  # not read
    bound = (options.score_bound or 0.0) * unit
    if norms:
        longest_key = _longest_keys(key) if older is None else older.largest[:, None].float()
        # A computed product exceeds the norms' product by D roundings.
        bound = options.scale * unit * (1 + (width + 16) * 2.0**-23)
    q, k, v = (rows_contiguous(x) for x in (query, key, value))
    constants = launch.kernel_constants(query, value, first, options) | {
        "ONLINE": launch.needs_running_maximum(query.dtype, options),
        "NORMS": norms,
        "EARLY": early,
        "KEEP_OUT_ERROR": state.out_error.numel() > 0,
        "REF_SHIFT": 15.0 if query.dtype == torch.float16 else 0.0,
        "STEEPEST": launch.steepest_slope(query.dtype),
        "PIECE": counted is not None,
    }
    numbers = (
        options.scale * unit, *launch.cuts(options), options.threshold * unit, bound,
        math.log(options.tolerance) * unit if early else 0.0, 0.0 if older is None else float(older.number),
        *launch.drop_arguments(options.dropout),
    )  # fmt: skip

    def launch_with(tile: block_shapes.ForwardTile) -> None:
        launcher.begin()
        blocks = -(-n_queries // tile.rows)
        launcher.launch(
            forward_kernel, (blocks * batch * heads,),
            q, k, v, log_forget, first, last, longest_key, seed, *state, counted,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *log_forget.stride(), *state.out.stride()[:3],
            heads_sorted_together(batch * heads, blocks, early, min_heads=16),
            n_queries, n_keys, heads, heads // kv_heads, *numbers,
            **constants, BM=tile.rows, BN=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
            **launch.register_limit(tile.registers),
        )  # fmt: skip

    tiles = block_shapes.candidates(block_shapes.FORWARD, constants["BD"], constants["BDV"], q.element_size(), q.device)
    with device_guard(q.device):
        block_shapes.run((q.device, query.dtype, *constants.values()), n_keys, tiles, launch_with)


@torch.library.custom_op("tra::fused_forward", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    seed: Tensor | None,
    scale: float,
    threshold: float,
    margin: float,
    score_bound: float | None,
    dropout: float,
    tolerance: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a `ForwardState`."""
    state = empty_forward_state(query, value, training)
    options = AttentionOptions(scale, threshold, score_bound, dropout, tolerance, margin)
    run_forward(state, query, key, value, log_forget, first, last, seed, options)
    return tuple(state)  # type: ignore[return-value]


@_forward.register_fake
def _(query, key, value, *rest):  # type: ignore[no-untyped-def]
    return tuple(empty_forward_state(query, value, training=rest[10]))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, log_forget, first, last, seed, *numbers, tolerance, _ = inputs
    ctx.set_materialize_grads(False)  # of outputs that only backward reads
    ctx.save_for_backward(query, key, value, log_forget, first, last, seed, *output)
    ctx.options = (*numbers, tolerance > 0)


def _autograd(ctx, grad_out, *_grads_of_the_rest):  # type: ignore[no-untyped-def]
    with without_autocast(grad_out.device):
        grads = torch.ops.tra.fused_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *grads, *(None,) * 10


_forward.register_autograd(_autograd, setup_context=_setup_context)
