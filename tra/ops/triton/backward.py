"""Launches the two backward kernels, as an operator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.options import AttentionOptions
from tra.ops.triton import block_shapes, launch
from tra.ops.triton.direct_launch import TRITON, Launcher
from tra.ops.triton.launch import ForwardState, device_guard, heads_sorted_together, rows_contiguous

MIN_TRANSIENT_BYTES = 256 * 2**20
"""Bytes that backward may always hold besides its results: a number per row and key block, for a chunk of rows."""
TRANSIENT_SHARE = 16
"""Backward may hold one part in this many of a GPU's memory. More memory means fewer chunks and sums over them."""


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    forget: Tensor


class NormFactors(NamedTuple):
    """Factors by which an RMS norm multiplied rows. Gradients are then those of the inputs of the norm and of log σ."""

    query: Tensor  # [B, H, Tq]
    key: Tensor  # [B, Hkv, Tk]


def empty_gradients(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Gradients:
    """Return gradients in the layout of the tensors, but with contiguous rows."""

    def like(x: Tensor) -> Tensor:
        return torch.empty_like(
            x, memory_format=torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
        )

    return Gradients(like(query), like(key), like(value), torch.empty_like(log_forget))


def _transient_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return MIN_TRANSIENT_BYTES
    return max(MIN_TRANSIENT_BYTES, torch.cuda.get_device_properties(device).total_memory // TRANSIENT_SHARE)


def run_backward(
    grads: Gradients,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    seed: Tensor | None,
    state: ForwardState,
    options: AttentionOptions,
    early: bool,
    factors: NormFactors | None = None,
    launcher: Launcher = TRITON,
    counted_right: Tensor | None = None,
) -> None:
    """Fill `grads` with two kernels, over chunks of query rows, which bound the memory between the two.

    Args:
        early: Whether walks of the forward may have stopped. The `tolerance` of the options isn't read.
        counted_right: `[B, H, Tq]`, if these keys are a piece of a row's keys: the number of counted keys right of it.
            `state` is then that of whole rows, except `stop`.
    """
    from tra.ops.triton.backward_kernels import key_gradient_kernel, query_gradient_kernel

    batch, heads, n_queries, _ = query.shape
    kv_heads, n_keys = key.shape[1:3]
    q, k, v, g = (rows_contiguous(x) for x in (query, key, value, grad_out))
    out, out_error, reference, total, stop = state
    query_factor, key_factor = factors or (None, None)
    is_float32 = query.dtype == torch.float32
    if out_error.numel() == 0 and not is_float32:  # the forward wasn't told that gradients are wanted
        out_error = torch.zeros_like(out)
    constants = launch.kernel_constants(query, value, first, options)
    constants["ONLINE"] = launch.needs_running_maximum(query.dtype, options)
    numbers = (
        options.scale, options.scale * launch.logit_unit(query.dtype),
        *launch.cuts(options), *launch.drop_arguments(options.dropout),
    )  # fmt: skip
    skip = early or first is not None
    short = early or n_keys <= launch.MAX_FULL_WALK_KEYS

    def launch_with(tile: block_shapes.BackwardTile) -> None:
        launcher.begin()
        n_blocks = -(-n_keys // tile.keys)
        rows = max(1, _transient_bytes(q.device) // (4 * batch * heads * n_blocks * tile.rows)) * tile.rows
        once = rows >= n_queries
        starter = launcher if once else TRITON  # a recorder would allocate for all chunks at once
        grad_k, grad_v = grads.key, grads.value
        if not once:
            grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (grad_k, grad_v))
        slope_inner = starter.empty((*reference.shape, 2), torch.float32, q.device)
        for chunk in range(0, n_queries, rows):
            blocks = -(-min(rows, n_queries - chunk) // tile.rows)
            n_rows = blocks * tile.rows
            # Causal rows don't see keys beyond the chunk's last query, so no program needs to visit these.
            seen = n_keys if once or first is not None else min(n_keys, n_keys - n_queries + chunk + n_rows)
            seen_blocks = -(-seen // tile.keys)
            offsets = starter.empty(batch * heads * n_blocks * n_rows, torch.float32, q.device)
            walk_ends = starter.empty(batch * heads * blocks * 2, torch.int32, q.device)
            listed = batch * heads * n_blocks * blocks if skip else 0
            row_blocks = starter.empty(listed, torch.int32, q.device)
            # Long walks are launched head by head, which was measured to be faster.
            order = heads_sorted_together(batch * heads, blocks, early) if short else 1
            sizes = (chunk, n_rows, n_blocks, n_queries, n_keys, heads, heads // kv_heads)
            starter.launch(
                query_gradient_kernel, (blocks * batch * heads,),
                q, k, v, log_forget, first, last, seed, out, out_error, g, reference, total, stop, counted_right,
                query_factor, grads.query, grads.forget, slope_inner, offsets, walk_ends,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *log_forget.stride(), *out.stride()[:3],
                *g.stride()[:3], *grads.query.stride()[:3], *grads.forget.stride(),
                order, *sizes, *numbers,
                **constants, BEFORE_NORM=factors is not None, STEEPEST=launch.steepest_slope(query.dtype),
                PIECE=counted_right is not None,
                BM=tile.rows, BN=tile.query_keys, KEY_RATIO=tile.keys // tile.query_keys,
                num_warps=tile.query_warps, num_stages=tile.query_stages,
                **launch.register_limit(tile.query_registers),
            )  # fmt: skip
            starter.launch(
                key_gradient_kernel, (seen_blocks * batch * kv_heads,),
                q, k, v, first, last, seed, g, reference, total, key_factor, grad_k, grad_v, slope_inner, offsets,
                walk_ends, row_blocks, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3],
                *grad_k.stride()[:3], *grad_v.stride()[:3],
                seen_blocks, heads_sorted_together(batch * kv_heads, seen_blocks), *sizes, *numbers,
                **constants, SKIP=skip, ACCUMULATE=not once,
                BEFORE_NORM=once and factors is not None, THREADS=32 * tile.key_warps,
                ROW_RATIO=tile.rows // tile.key_rows, EVEN=n_queries % tile.rows == 0,
                BM=tile.key_rows, BN=tile.keys, num_warps=tile.key_warps, num_stages=tile.key_stages,
            )  # fmt: skip
        if not once:
            grads.key.copy_(grad_k if key_factor is None else _gradient_before_norm(grad_k, k, key_factor))
            grads.value.copy_(grad_v)

    table = block_shapes.BACKWARD_SHORT if short else block_shapes.BACKWARD
    tiles = block_shapes.candidates(table, constants["BD"], constants["BDV"], q.element_size(), q.device)
    with device_guard(q.device):
        block_shapes.run((q.device, query.dtype, early, short, *constants.values()), n_keys, tiles, launch_with)


def _gradient_before_norm(grad: Tensor, normalised: Tensor, factor: Tensor) -> Tensor:
    """Return what the kernels' function of that name returns."""
    return (grad - normalised * (grad * normalised).mean(-1, keepdim=True)) * factor[..., None]


@torch.library.custom_op("tra::fused_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    low: Tensor,
    reference: Tensor,
    total: Tensor,
    stop: Tensor,
    scale: float,
    threshold: float,
    margin: float,
    score_bound: float | None,
    dropout: float,
    early: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `Gradients`. `low` is the state's `out_error`."""
    grads = empty_gradients(query, key, value, log_forget)
    run_backward(
        grads, grad_out, query, key, value, log_forget, first, last, seed,
        ForwardState(out, low, reference, total, stop),
        AttentionOptions(scale, threshold, score_bound, dropout, margin=margin), early,
    )  # fmt: skip
    return tuple(grads)  # type: ignore[return-value]


@_backward.register_fake
def _(grad_out, query, key, value, log_forget, *_rest):  # type: ignore[no-untyped-def]
    return tuple(empty_gradients(query, key, value, log_forget))
