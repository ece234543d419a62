"""The right-to-left walk in plain PyTorch: linear memory, and a stop as soon as the rest provably doesn't count.

A block of queries starts at its last visible key block and walks left. Each row carries the softmax maximum,
sum and output, and c, the keys kept so far. Left of a stop every key has distance at least c + 1, and distances
are distinct integers, so K remaining keys weigh at most

    exp(S_max + δ (c + 1)) · (1 - exp(δ K)) / (1 - exp δ)

When that is below `tolerance` of the sum so far in every row of the block, the walk of that head ends.

Padding is taken out beforehand (real keys move to the front, queries get their new last key), so on the full walk
(tolerance 0) a row's result is the same bits wherever its padding stood. Block shapes are fixed and edges zero-filled
for the same reason.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tra.ops.block_layout import Layout, Walk, query_block, without_padding
from tra.ops.dropout import keep_weights
from tra.ops.inputs import Visible, compute_dtype, without_autocast
from tra.ops.newest_first import MOST_QUERIES, tail
from tra.ops.stop_bound import log_rest


def blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    visible: Visible,
    *,
    scale: float,
    threshold: float,
    score_bound: float | None,
    dropout: float,
    seed: Tensor | None,
    tolerance: float,
) -> Tensor:
    """Same result as `reference` up to rounding and `tolerance`, without ever holding a Tq × Tk tensor."""
    first, last, key_mask = visible
    if score_bound is not None and tolerance > 0 and dropout == 0 and _decodes(query, key, value, log_forget):
        options = {"scale": scale, "threshold": threshold, "score_bound": score_bound, "tolerance": tolerance}
        return tail(query, key, value, log_forget, visible, **options)
    if key_mask is not None:
        key, value, first, last = without_padding(key, value, first, last, key_mask)
    if seed is None:
        seed = torch.zeros(1, dtype=torch.int64, device=query.device)
    out, _, _, _ = torch.ops.tra.blockwise_forward(
        query, key, value, log_forget, first, last, seed, scale, threshold, score_bound, dropout, tolerance
    )
    return out.to(query.dtype)


def _decodes(query: Tensor, *others: Tensor) -> bool:
    """Few queries, no gradients, and a device that is no trouble to ask."""
    wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (query, *others))
    here = query.device.type == "cpu" and not torch.compiler.is_compiling()
    return query.shape[2] <= MOST_QUERIES and here and not wants_gradients


def _scores(
    layout: Layout,
    walk: Walk,
    index: int,
    query: Tensor,
    key: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """Scaled scores and kept keys of one block, the same bits in forward and backward."""
    scores = torch.bmm(query, key.mT).mul_(scale)  # [n, R, D] @ [n, D, K] -> [n, R, K]
    kept = ~(scores <= threshold)
    if not walk.whole_from <= index <= walk.whole_to:
        columns = layout.column_numbers(index)
        kept &= (first[..., None] <= columns) & (columns <= last[..., None])
    return scores, kept


def _add_distance(scores: Tensor, kept: Tensor, log_forget: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, distances, and the count of kept keys after this block. Overwrites `scores`."""
    ones = kept.to(scores.dtype)
    distances = ones.cumsum(-1)
    total = distances[..., -1]
    distances = (total + count)[..., None].sub(distances).add_(ones)
    logits = scores.addcmul_(log_forget[..., None], distances).masked_fill_(~kept, -torch.inf)
    return logits, distances, count + total


class _Bound:
    """The largest score a row can still meet left of a key block; NaN, which nothing is below, where a NaN waits."""

    def __init__(self, layout: Layout, keys: Tensor, values: Tensor, scale: float, score_bound: float | None) -> None:
        # A computed dot product exceeds the norms' product by no more than D roundings.
        self.factor = abs(scale) * (1 + (layout.width + 2) * _epsilon(layout.dtype, keys.device))
        if score_bound is None:
            norms = _norms(keys)
        else:
            norms = torch.full(keys.shape[:2], score_bound, dtype=torch.float64, device=keys.device)
        self.promised = score_bound is not None
        norms = norms.masked_fill(keys.isnan().any(-1) | values.isnan().any(-1), torch.nan)
        by_block = norms.view(layout.n, -1, layout.key_block).amax(-1)
        self.longest = by_block.cummax(-1).values  # [N, blocks]: of blocks 0..index

    def left_of(self, index: int, query_norm: Tensor, active: Tensor | slice) -> Tensor:
        longest = self.longest[active, index - 1][:, None]
        return longest.expand_as(query_norm) if self.promised else query_norm * longest * self.factor


def _norms(x: Tensor) -> Tensor:
    """Euclidean, in float64: squares of small float32 numbers are 0."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)


def _epsilon(dtype: torch.dtype, device: torch.device) -> float:
    """Of the matrix products, which round float32 to TF32 where that is allowed."""
    rounded = dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return 2.0**-10 if rounded else torch.finfo(dtype).eps


@torch.library.custom_op("tra::blockwise_forward", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor,
    last: Tensor,
    seed: Tensor,
    scale: float,
    threshold: float,
    score_bound: float | None,
    dropout: float,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output; softmax maximum and sum `[B, H, Tq]`; the oldest key block visited per head and query block.

    Maximum and sum stay apart: their logarithm would cost the weights of backward a digit.
    """
    layout = Layout(query, key, value, first, last)
    walks = layout.walks()
    out = query.new_empty(*query.shape[:3], layout.value_width, dtype=layout.dtype)
    highest, total = (query.new_empty(query.shape[:3], dtype=layout.dtype) for _ in range(2))
    stops = torch.empty(layout.n, len(walks), dtype=torch.int64, device=query.device)
    keys, values = layout.flat_keys(key), layout.flat_keys(value)
    bound = _Bound(layout, keys, values, scale, score_bound) if tolerance > 0 else None
    for number, walk in enumerate(walks):
        with without_autocast(query.device):
            b_out, b_highest, b_total, stops[:, number] = _walk_forward(
                layout, walk, query, keys, values, log_forget, seed, scale, threshold, dropout, tolerance, bound
            )
        layout.put(out, walk.rows, b_out)
        layout.put(highest, walk.rows, b_highest)
        layout.put(total, walk.rows, b_total)
    return out, highest, total, stops


def _walk_forward(
    layout: Layout,
    walk: Walk,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    log_forget: Tensor,
    seed: Tensor,
    scale: float,
    threshold: float,
    dropout: float,
    tolerance: float,
    bound: _Bound | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b_query, b_forget = layout.take(query, walk.rows), layout.take(log_forget, walk.rows)
    b_first, b_last = layout.range_of(walk.rows)
    numbers = layout.row_numbers(walk.rows)
    norm = _norms(b_query)
    highest = torch.full_like(b_forget, -torch.inf)
    total, count = torch.zeros_like(b_forget), torch.zeros_like(b_forget)
    out = b_forget.new_zeros(*b_forget.shape, layout.value_width)

    all_out, all_highest, all_total = torch.empty_like(out), torch.empty_like(highest), torch.empty_like(total)
    stops = torch.full((layout.n,), walk.oldest, dtype=torch.int64, device=query.device)
    active = torch.arange(layout.n, device=query.device)  # heads whose walk goes on

    def finish(which: Tensor) -> None:
        heads = active[which]
        divisor = torch.where(total[which] == 0, 1.0, total[which])
        all_out[heads] = out[which] / divisor[..., None]
        all_highest[heads], all_total[heads] = highest[which], total[which]

    for index in range(walk.newest, walk.oldest - 1, -1):
        everyone = len(active) == layout.n
        chosen: Tensor | slice = slice(None) if everyone else active
        b_key = keys[chosen, layout.columns(index)].to(layout.dtype)
        b_value = values[chosen, layout.columns(index)].to(layout.dtype)
        scores, kept = _scores(layout, walk, index, b_query, b_key, b_first, b_last, scale, threshold)
        logits, _, count = _add_distance(scores, kept, b_forget, count)

        new_highest = torch.maximum(highest, logits.amax(-1))
        reference = torch.where(new_highest == -torch.inf, 0.0, new_highest)
        weights = logits.sub_(reference[..., None]).exp_()
        shrink = torch.exp(highest - reference)
        highest, total = new_highest, total * shrink + weights.sum(-1)
        if dropout > 0:
            columns = layout.column_numbers(index)
            weights.mul_(keep_weights(seed, numbers, columns, dropout)).div_(1 - dropout)
        out = torch.baddbmm(out.mul_(shrink[..., None]), weights, b_value)

        if bound is None or index == walk.oldest:
            continue
        keys_left = ((b_last + 1).clamp(max=index * layout.key_block) - b_first).clamp(min=0).to(layout.dtype)
        rest = log_rest(b_forget, count, keys_left, bound.left_of(index, norm, chosen).to(layout.dtype))
        done = ((keys_left == 0) | (rest - highest - total.log() < math.log(tolerance))).all(-1)
        if not bool(done.any()):
            continue
        finish(done)
        stops[active[done]] = index
        going = ~done
        active = active[going]
        b_query, b_forget, b_first, b_last, numbers, norm = (
            x[going] for x in (b_query, b_forget, b_first, b_last, numbers, norm)
        )
        highest, total, count, out = (x[going] for x in (highest, total, count, out))
        if len(active) == 0:
            break
    finish(torch.ones(len(active), dtype=torch.bool, device=query.device))
    return all_out, all_highest, all_total, stops


@_forward.register_fake
def _(query, key, value, log_forget, first, last, seed, scale, threshold, score_bound, dropout, tolerance):  # type: ignore[no-untyped-def]
    n_queries = query.shape[2]
    blocks = -(-n_queries // query_block(query.device, n_queries))
    dtype = compute_dtype(query.dtype)
    return (
        query.new_empty(*query.shape[:3], value.shape[3], dtype=dtype),
        query.new_empty(query.shape[:3], dtype=dtype),
        query.new_empty(query.shape[:3], dtype=dtype),
        query.new_empty(key.shape[0] * key.shape[1], blocks, dtype=torch.int64),
    )


@torch.library.custom_op("tra::blockwise_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor,
    last: Tensor,
    seed: Tensor,
    out: Tensor,
    highest: Tensor,
    total: Tensor,
    stops: Tensor,
    scale: float,
    threshold: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same walk again: counts are recomputed, the stop is the forward's, sums run in a fixed order."""
    layout = Layout(query, key, value, first, last)
    keys, values = layout.flat_keys(key), layout.flat_keys(value)
    grad_query, grad_forget = torch.empty_like(query), torch.empty_like(log_forget)
    grad_keys = torch.zeros(keys.shape, dtype=layout.dtype, device=keys.device)
    grad_values = torch.zeros(values.shape, dtype=layout.dtype, device=keys.device)
    for number, walk in enumerate(layout.walks()):
        b_query, b_forget = layout.take(query, walk.rows), layout.take(log_forget, walk.rows)
        b_grad_out = layout.take(grad_out, walk.rows)
        b_highest, b_total = layout.take(highest, walk.rows), layout.take(total, walk.rows)
        empty = b_total == 0  # a row that keeps nothing has no weights to scale
        b_highest, b_total = b_highest.masked_fill(empty, 0.0), b_total.masked_fill(empty, 1.0)
        b_first, b_last = layout.range_of(walk.rows)
        numbers = layout.row_numbers(walk.rows)
        # Sum over keys of weight · its gradient. It cancels against the gradients below, hence the precision.
        inner = (b_grad_out.double() * layout.take(out, walk.rows).double()).sum(-1).to(layout.dtype)
        b_grad_query, b_grad_forget = torch.zeros_like(b_query), torch.zeros_like(b_forget)
        count = torch.zeros_like(b_forget)
        b_stops = stops[:, number].tolist()
        for index in range(walk.newest, min(b_stops) - 1, -1):
            heads = [n for n, stop in enumerate(b_stops) if stop <= index]  # whose forward came this far
            on = slice(None) if len(heads) == layout.n else torch.tensor(heads, device=query.device)
            columns = layout.columns(index)
            b_key, b_value = keys[on, columns].to(layout.dtype), values[on, columns].to(layout.dtype)
            scores, kept = _scores(layout, walk, index, b_query[on], b_key, b_first[on], b_last[on], scale, threshold)
            logits, distances, count[on] = _add_distance(scores, kept, b_forget[on], count[on])
            weights = logits.sub_(b_highest[on][..., None]).exp_().div_(b_total[on][..., None])
            grad_weights = torch.bmm(b_grad_out[on], b_value.mT)  # [n, R, Dv] @ [n, Dv, K] -> [n, R, K]
            used = weights
            if dropout > 0:
                stays = keep_weights(seed, numbers[on], layout.column_numbers(index), dropout)
                used = weights * stays / (1 - dropout)
                grad_weights.mul_(stays).div_(1 - dropout)
            grad_values[on, columns] += torch.bmm(used.mT, b_grad_out[on])
            grad_scores = grad_weights.sub_(inner[on][..., None]).mul_(weights)
            b_grad_forget[on] += (grad_scores * distances).sum(-1)
            b_grad_query[on] += torch.bmm(grad_scores, b_key).mul_(scale)
            grad_keys[on, columns] += torch.bmm(grad_scores.mT, b_query[on]).mul_(scale)
        layout.put(grad_query, walk.rows, b_grad_query)
        layout.put(grad_forget, walk.rows, b_grad_forget)
    grad_key, grad_value = (
        torch.empty_like(like).copy_(grad[:, : layout.n_keys].view(like.shape))
        for grad, like in ((grad_keys, key), (grad_values, value))
    )
    return grad_query, grad_key, grad_value, grad_forget


@_backward.register_fake
def _(grad_out, query, key, value, log_forget, *_rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), torch.empty_like(log_forget)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, log_forget, first, last, seed, scale, threshold, _, dropout, _ = inputs
    ctx.save_for_backward(query, key, value, log_forget, first, last, seed, *output)
    ctx.options = (scale, threshold, dropout)


def _autograd(ctx, grad_out, *_grads_of_the_rest):  # type: ignore[no-untyped-def]
    with without_autocast(grad_out.device):
        grads = torch.ops.tra.blockwise_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *grads, *(None,) * 8


_forward.register_autograd(_autograd, setup_context=_setup_context)
