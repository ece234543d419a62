"""Attend to a sequence that several processes share. `docs/context-parallel.md` has the derivation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from tra import unknown_name
from tra.ops import choice, inputs
from tra.ops.blockwise import RunningSoftmax
from tra.ops.context.backward import BackwardWalk
from tra.ops.context.forward import ForwardWalk
from tra.ops.context.parts import SequenceParts
from tra.ops.context.pieces import BlockwisePieces, Pieces, TritonPieces
from tra.ops.context.shared_keys import SharedKeys
from tra.ops.forward_mode import refuse_forward_mode
from tra.ops.options import AttentionOptions
from tra.ops.triton.availability import why_unavailable

CONTEXT_IMPLEMENTATIONS = ("auto", "blockwise", "triton")


@_disable_dynamo  # that of torch.compiler would import compilers, and Triton, with the package
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    parts: SequenceParts,
    *,
    scale: float | None = None,
    threshold: float = 0.0,
    margin: float = 0.0,
    key_mask: Tensor | None = None,
    score_bound: float | None = None,
    tolerance: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return this process's rows of `threshold_relative_attention` over the whole sequence.

    All processes of the group make this call and its backward together, with tensors of the same batch, heads, widths
    and dtype, and with the same options. If one of them ends or raises, the others raise a RuntimeError, after the
    timeout of the group at the latest.

    Args:
        query: `[B, H, T, D]`, where T is `parts.own_length`: what `parts.take` returns.
        key: `[B, Hkv, T, D]`.
        value: `[B, Hkv, T, Dv]`.
        log_forget: `[B, H, T]`.
        parts: How the sequence is dealt, and where its documents begin if it has several.
        key_mask: `[B, T]` bool. A False key never stays and never counts.
        tolerance: As for `threshold_relative_attention`. Above 0, keys that provably don't count are not sent; 0.0
            sends all keys.
        impl: "blockwise" or "triton"; "auto" takes the kernels on a GPU where they are available.

    The other arguments are those of `threshold_relative_attention`. Dropout is not available.

    Returns:
        `[B, H, T, Dv]` in query's dtype.
    """
    inputs.check_attention(query, key, value, log_forget, key_mask, None)
    parts.check_own(query.shape[2])
    parts.check_own(key.shape[2])
    _check_documents(query, key_mask, parts)
    refuse_forward_mode("context_parallel_attention")
    options = AttentionOptions.resolve(
        query.shape[-1], query.dtype, scale, threshold, score_bound, 0.0, tolerance, margin
    )
    if options.scale < 0:  # the kernels take a positive one
        query, options = -query, replace(options, scale=-options.scale)
    pieces = _pieces(impl, query, value)
    with inputs.without_autocast(query.device):
        out: Tensor = _ContextParallel.apply(query, key, value, log_forget, key_mask, parts, options, pieces)
    return out


def _check_documents(query: Tensor, key_mask: Tensor | None, parts: SequenceParts) -> None:
    starts = parts.document_starts
    if starts is None:
        return
    if key_mask is not None:
        raise ValueError("give either key_mask or documents: padding between documents takes its own id")
    if len(starts) != len(query):
        raise ValueError(f"the documents are of {len(starts)} rows, query has {len(query)}")


def _pieces(impl: str, query: Tensor, value: Tensor) -> type[Pieces]:
    """Return the class that computes the pieces."""
    if impl not in CONTEXT_IMPLEMENTATIONS:
        raise ValueError(unknown_name("impl", impl, CONTEXT_IMPLEMENTATIONS))
    width = max(query.shape[3], value.shape[3])
    if impl == "auto":
        impl = "triton" if choice.auto_takes_triton(query.device, query.dtype, width) else "blockwise"
    reason = why_unavailable(query.device, query.dtype, width) if impl == "triton" else None
    if reason is not None:
        raise RuntimeError(f"impl='triton' is not available: {reason}")
    return TritonPieces if impl == "triton" else BlockwisePieces


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, *rest: Any) -> Tensor:
        key_mask, parts, options, pieces = rest
        shared = SharedKeys(query, key, value, log_forget, key_mask, parts, options)
        walk = ForwardWalk(shared, pieces)
        walk.run()
        found = [x for part in shared.own for x in walk.found[part]]
        ctx.save_for_backward(query, key, value, log_forget, key_mask, shared.n_real, *found)
        ctx.rest = (parts, options, pieces, walk.steps, walk.ticks)
        return shared.join([walk.found[part].out for part in shared.own]).to(query.dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, log_forget, key_mask, n_real, *saved = ctx.saved_tensors
        parts, options, pieces, steps, ticks = ctx.rest
        with inputs.without_autocast(query.device):
            shared = SharedKeys(query, key, value, log_forget, key_mask, parts, options)
            shared.n_real = n_real
            found = {part: RunningSoftmax(*saved[4 * i : 4 * i + 4]) for i, part in enumerate(shared.own)}
            return *BackwardWalk(shared, pieces, found, steps, ticks).run(grad_out), None, None, None, None
