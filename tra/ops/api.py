"""The public functions: they check the input, choose an implementation and call it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tra.ops import choice, inputs
from tra.ops.blockwise import blockwise_attention
from tra.ops.dropout import draw_seed
from tra.ops.full_map import AttentionMap, full_attention_map
from tra.ops.newest_first import newest_first_attention
from tra.ops.options import AttentionOptions
from tra.ops.reference import reference_attention
from tra.ops.triton import eager
from tra.ops.triton.forward import triton_attention
from tra.ops.visible import Visible, visible_in_sequences, visible_keys

IMPLEMENTATIONS = ("auto", "reference", "blockwise", "triton")
IN_PYTORCH: dict[str, Callable[..., Tensor]] = {
    "reference": reference_attention,
    "newest-first": newest_first_attention,
    "blockwise": blockwise_attention,
}
"""By the names in `choice.AUTO`."""


def threshold_relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    *,
    scale: float | None = None,
    threshold: float = 0.0,
    margin: float = 0.0,
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    score_bound: float | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return causal attention without keys below a threshold, in which distance counts only the keys that remain.

    For query i and key j, with `S_ij = scale · q_i·k_j`: a key counts when `S_ij > threshold`, and stays in the softmax
    when `S_ij > threshold - margin`; its distance `n_ij` is 1 plus the number of counted keys right of j, up to i; its
    weight is the softmax over the keys that stay of `S_ij + log_forget_i · n_ij`. Without a margin, keys that stay are
    those that count. Queries stand at the end of the keys: query i sees keys up to `Tk - Tq + i`.

    TRA normalises queries and keys, each to a root mean square of 1 and without a learned scale, before the product.
    The layer, `tra.ThresholdRelativeAttention`, does so; this function takes both as they are, so its caller does.

    Args:
        query: `[B, H, Tq, D]`, normalised.
        key: `[B, Hkv, Tk, D]`, normalised; query head h reads key head `h // (H / Hkv)`.
        value: `[B, Hkv, Tk, Dv]`.
        log_forget: `[B, H, Tq]`, float32 (float64 with float64 queries), finite and at most 0.
        scale: Factor on the scores, `1 / sqrt(D)` by default.
        threshold: A key counts as distance when its scaled score is above it.
        margin: A key stays when its score is above `threshold - margin`. 0 is the paper's TRA; at `math.inf` every
            visible key stays. A key inside the margin is attended to, but adds no distance to older keys.
        key_mask: `[B, Tk]` bool. A False key never stays and never counts, wherever it stands.
        key_lengths: `[B]` int32. Keys `0..length-1` exist (a static cache), and queries stand at their end. Slots
            beyond must hold zeros: a NaN there would reach the output as 0 · NaN.
        score_bound: A promise that no absolute scaled score exceeds it; lets fast paths skip work.
        dropout: Rate at which attention weights are dropped; the others are scaled up.
        tolerance: Largest relative weight that an early stop may leave out. None is what rounding of the sums hides
            anyway (`2**-24`, for float64 `2**-53`); 0.0 never stops early.
        impl: "reference", "blockwise" or "triton"; "auto" chooses by the table in `tra/ops/choice.py`. A named
            implementation never falls back to another.

    Returns:
        `[B, H, Tq, Dv]` in query's dtype. A row that keeps no key is 0. NaN in, NaN out: a NaN score counts and
        stays, so that it shows, and a NaN or infinite value may show in any row that sees it or could have. A
        promised `score_bound` is a promise about NaN too: with it, "triton" may stop before it has read one.
    """
    kind = None
    if key_mask is None and not torch.compiler.is_compiling():
        numbers = (scale, threshold, margin, score_bound, dropout, tolerance, impl)
        kind = eager.kind_of(query, key, value, log_forget, key_lengths, *numbers)
        if kind is not None and (call := eager.SEEN.get(kind.key)) is not None:
            return call(query, key, value, log_forget, key_lengths, kind.pointers)
    inputs.check_attention(query, key, value, log_forget, key_mask, key_lengths)
    options = AttentionOptions.resolve(
        query.shape[-1], query.dtype, scale, threshold, score_bound, dropout, tolerance, margin
    )
    impl = _choose(query, key, value, log_forget, options, impl)
    if kind is not None and impl == "triton":
        call = eager.learn(kind, query, key, value, log_forget, options)
        if call is not None:
            return call(query, key, value, log_forget, key_lengths, kind.pointers)
    plainly_causal = key_mask is None and key_lengths is None
    visible = None if plainly_causal else visible_keys(query, key, key_mask, key_lengths)
    return attend(query, key, value, log_forget, visible, options, impl)


def threshold_relative_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    scale: float | None = None,
    threshold: float = 0.0,
    margin: float = 0.0,
    score_bound: float | None = None,
    dropout: float = 0.0,
    tolerance: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return `threshold_relative_attention` over sequences packed one after another, which don't see each other.

    Args:
        query: `[total_q, H, D]`.
        key: `[total_k, Hkv, D]`.
        value: `[total_k, Hkv, Dv]`.
        log_forget: `[total_q, H]`.
        cu_seqlens_q: `[S + 1]` int32, rising from 0 to total_q: sequence s has queries `cu[s]..cu[s+1]-1`.
            A sequence may be empty.
        cu_seqlens_k: The same for keys; cu_seqlens_q by default.

    The other arguments are those of `threshold_relative_attention`.

    Returns:
        `[total_q, H, Dv]`.
    """
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    inputs.check_packed(query, key, value, log_forget, cu_seqlens_q, cu_seqlens_k)
    options = AttentionOptions.resolve(
        query.shape[-1], query.dtype, scale, threshold, score_bound, dropout, tolerance, margin
    )
    visible = visible_in_sequences(cu_seqlens_q, cu_seqlens_k, query.shape[0])
    query, key, value, log_forget = (x.transpose(0, 1)[None] for x in (query, key, value, log_forget))
    impl = _choose(query, key, value, log_forget, options, impl)
    return attend(query, key, value, log_forget, visible, options, impl)[0].transpose(0, 1)


def attention_map(
    query: Tensor,
    key: Tensor,
    log_forget: Tensor,
    *,
    scale: float | None = None,
    threshold: float = 0.0,
    margin: float = 0.0,
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    queries: slice = slice(None),
    keys: slice = slice(None),
    rows_at_once: int = 256,
) -> AttentionMap:
    """Return the weights, distances and scores of a window, and which keys stay and count, for figures.

    Args:
        queries: Which queries the window shows; all by default.
        keys: Which keys it shows. Weights and distances are those of the whole row, seen through the window.
        rows_at_once: Rows that are computed at full length at a time, so that long inputs never need a Tq × Tk map.

    Returns:
        An `AttentionMap` of tensors `[B, H, queries, keys]`. Without gradients.
    """
    inputs.check_attention(query, key, None, log_forget, key_mask, key_lengths)
    options = AttentionOptions.resolve(query.shape[-1], query.dtype, scale, threshold, margin=margin)
    if rows_at_once < 1:
        raise ValueError(f"rows_at_once must be at least 1, got {rows_at_once}")
    visible = visible_keys(query, key, key_mask, key_lengths)
    start, stop, step = queries.indices(query.shape[2])
    if step != 1 or start >= stop:
        raise ValueError(f"queries must be a non-empty slice of step 1 within 0..{query.shape[2]}, got {queries}")
    parts = []
    with torch.no_grad(), inputs.without_autocast(query.device):
        for begin in range(start, stop, rows_at_once):
            rows = slice(begin, min(begin + rows_at_once, stop))
            part = full_attention_map(
                query[:, :, rows],
                key,
                log_forget[:, :, rows],
                Visible(visible.first[:, rows], visible.last[:, rows], key_mask),
                options,
            )
            parts.append([x[..., keys].clone() for x in part])
    return AttentionMap(*(torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True)))


def _choose(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, options: AttentionOptions, impl: str) -> str:
    """Return the named implementation, or the one that is best for a call."""
    if impl == "auto":
        return choice.choose(choice.AUTO, choice.Call(query, key, value, log_forget, options))
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"unknown impl {impl!r}, expected one of {', '.join(IMPLEMENTATIONS)}")
    return impl


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    visible: Visible | None,
    options: AttentionOptions,
    impl: str,
) -> Tensor:
    """Call an implementation. `visible` is None where queries see all keys up to their own."""
    seed = draw_seed(query.device) if options.dropout > 0 else None
    with inputs.without_autocast(query.device):  # scores have one precision, whatever the caller's autocast says
        if impl == "triton":
            return triton_attention(query, key, value, log_forget, visible, options, seed)
        if visible is None:
            visible = visible_keys(query, key, None, None)
        return IN_PYTORCH[impl](query, key, value, log_forget, visible, options, seed)
