"""The gradients by fused Triton kernels, which are in `_backward_kernels.py`, registered as an operator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.raw_threshold import cut
from tra.ops.triton import block_shapes as _tiles
from tra.ops.triton import launch as _launch
from tra.ops.triton.launch import (
    LOG2_E,
    Made,
    drop_arguments,
    limit,
    on,
    online,
    rows_contiguous,
    shape_options,
    steepest,
    together,
)

TRANSIENT_BYTES = 256 * 2**20
"""What backward may hold beside its results (a number per query row and key block, for a chunk of rows), at least."""
TRANSIENT_SHARE = 16
"""It may hold this part of a GPU's memory: fewer chunks, fewer sums over chunks."""


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    forget: Tensor


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Gradients:
    """Laid out as these, but rows contiguous."""

    def alike(x: Tensor) -> Tensor:
        return torch.empty_like(
            x, memory_format=torch.preserve_format if x.stride(-1) == 1 else torch.contiguous_format
        )

    return Gradients(alike(query), alike(key), alike(value), torch.empty_like(log_forget))


def _transient_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return TRANSIENT_BYTES
    return max(TRANSIENT_BYTES, torch.cuda.get_device_properties(device).total_memory // TRANSIENT_SHARE)


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
    made: Made,
    scale: float,
    threshold: float,
    score_bound: float | None,
    dropout: float,
    early: bool,
    factors: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Into `grads`, by two kernels over chunks of query rows: what one leaves for the other stays within bounds.

    With `factors` `[B, H, Tq]` and `[B, Hkv, Tk]` queries and keys came from a norm that multiplied rows by these, and
    log_forget from log σ: gradients are those of what went in.
    """
    from tra.ops.triton.backward_kernels import key_gradient_kernel, query_gradient_kernel

    batch, heads, n_queries, _ = query.shape
    kv_heads, n_keys = key.shape[1:3]
    q, k, v, g = (rows_contiguous(x) for x in (query, key, value, grad_out))
    out, low, reference, total, stop = made
    exact = query.dtype == torch.float32
    query_factor, key_factor = factors or (None, None)
    if low.numel() == 0 and not exact:  # whoever called didn't say that gradients are wanted
        low = torch.zeros_like(out)
    running = online(query.dtype, threshold, score_bound)
    options = shape_options(query, value, first, dropout) | {"ONLINE": running, "EXACT": exact}
    numbers = (scale, scale * (1.0 if exact else LOG2_E), cut(scale, threshold), *drop_arguments(dropout))

    skip = early or first is not None
    short = early or n_keys <= _launch.EARLY_ABOVE

    def launch(tile: _tiles.Backward) -> None:
        n_blocks = -(-n_keys // tile.keys)
        rows = max(1, _transient_bytes(q.device) // (4 * batch * heads * n_blocks * tile.rows)) * tile.rows
        once = rows >= n_queries
        grad_k, grad_v = (
            (grads.key, grads.value)
            if once
            else (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (grads.key, grads.value))
        )
        pairs = reference.new_empty((*reference.shape, 2))
        for chunk in range(0, n_queries, rows):
            blocks = -(-min(rows, n_queries - chunk) // tile.rows)
            n_rows = blocks * tile.rows
            # Keys beyond the chunk's last query: plainly causal rows don't see them, nobody has to visit them.
            seen = n_keys if once or first is not None else min(n_keys, n_keys - n_queries + chunk + n_rows)
            seen = -(-seen // tile.keys)
            offsets = torch.empty(batch * heads * n_blocks * n_rows, dtype=torch.float32, device=q.device)
            span = torch.empty(batch * heads * blocks * 2, dtype=torch.int32, device=q.device)
            came = torch.empty(batch * heads * n_blocks * blocks if skip else 0, dtype=torch.int32, device=q.device)
            order = together(batch * heads, blocks, early) if short else 1  # long walks: by head, measured to be faster
            sizes = (chunk, n_rows, n_blocks, n_queries, n_keys, heads, heads // kv_heads)
            query_gradient_kernel[(blocks * batch * heads,)](
                q, k, v, log_forget, first, last, seed, out, low, g, reference, total, stop, query_factor,
                grads.query, grads.forget, pairs, offsets, span,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *log_forget.stride(), *out.stride()[:3],
                *g.stride()[:3], *grads.query.stride()[:3], *grads.forget.stride(),
                order, *sizes, *numbers,
                **options, BEFORE=factors is not None, STEEPEST=steepest(query.dtype),
                BM=tile.rows, BN=tile.query_keys, COARSER=tile.keys // tile.query_keys,
                num_warps=tile.query_warps, num_stages=tile.query_stages, **limit(tile.query_registers),
            )  # fmt: skip
            key_gradient_kernel[(seen * batch * kv_heads,)](
                q, k, v, first, last, seed, g, total, key_factor, grad_k, grad_v, pairs, offsets, span, came,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3],
                *grad_k.stride()[:3], *grad_v.stride()[:3], seen, together(batch * kv_heads, seen), *sizes, *numbers,
                **options, SKIP=skip, ACCUMULATE=not once,
                BEFORE=once and factors is not None, THREADS=32 * tile.key_warps,
                RATIO=tile.rows // tile.key_rows, EVEN=n_queries % tile.rows == 0,
                BM=tile.key_rows, BN=tile.keys, num_warps=tile.key_warps, num_stages=tile.key_stages,
            )  # fmt: skip
        if not once:
            grads.key.copy_(grad_k if key_factor is None else _before_norm(grad_k, k, key_factor))
            grads.value.copy_(grad_v)

    table = _tiles.BACKWARD_SHORT if short else _tiles.BACKWARD
    tiles = _tiles.candidates(table, options["BD"], options["BDV"], q.element_size(), q.device)
    with on(q.device):
        _tiles.run((q.device, query.dtype, early, short, *options.values()), n_keys, tiles, launch)


def _before_norm(grad: Tensor, normalised: Tensor, factor: Tensor) -> Tensor:
    """As the kernels' of that name."""
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
    score_bound: float | None,
    dropout: float,
    early: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `Gradients`."""
    grads = _empty_gradients(query, key, value, log_forget)
    run_backward(
        grads, grad_out, query, key, value, log_forget, first, last, seed, Made(out, low, reference, total, stop),
        scale, threshold, score_bound, dropout, early,
    )  # fmt: skip
    return tuple(grads)  # type: ignore[return-value]


@_backward.register_fake
def _(grad_out, query, key, value, log_forget, *_rest):  # type: ignore[no-untyped-def]
    return tuple(_empty_gradients(query, key, value, log_forget))
