"""The walk from right to left in plain PyTorch: linear memory, and an early stop. `README.md` derives both.

A block of queries starts at its last visible key block and walks left. Each row carries the softmax maximum, sum and
output, and the number of keys kept so far. When the keys left provably weigh less than `tolerance` of the sum so far,
in every row of the block, the walk of that head ends.

Padding is removed beforehand: real keys move to the front, queries get their new last key. So on the full walk
(tolerance 0) a row's result has the same bits wherever its padding stood. Block shapes are fixed and edges zero-filled
for the same reason.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.block_layout import Layout, RowBlock, Walk, query_block_size
from tra.ops.dropout import keep_weights
from tra.ops.forward_mode import refuse_forward_mode
from tra.ops.inputs import compute_dtype, without_autocast
from tra.ops.options import AttentionOptions
from tra.ops.stop_bound import OlderKeys, RemainingScores, euclidean_norms, log_remaining_weight
from tra.ops.visible import Visible, without_padding


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    visible: Visible,
    options: AttentionOptions,
    seed: Tensor | None,
) -> Tensor:
    """Return the reference's result up to rounding and `tolerance`, without ever holding a Tq × Tk tensor."""
    refuse_forward_mode("impl='blockwise'")
    first, last, key_mask = visible
    if key_mask is not None:
        key, value, first, last = without_padding(key, value, first, last, key_mask)
    if seed is None:
        seed = torch.zeros(1, dtype=torch.int64, device=query.device)
    out, _, _, _ = torch.ops.tra.blockwise_forward(
        query, key, value, log_forget, first, last, seed,
        options.scale, options.threshold, options.margin, options.score_bound, options.dropout, options.tolerance,
    )  # fmt: skip
    return out.to(query.dtype)


HEADROOM = 2.0**24
"""Most keys of equal weight whose values may all be the largest number."""


class RunningSoftmax(NamedTuple):
    """The state of rows `[n, R]` along their walk."""

    highest: Tensor  # largest logit so far
    total: Tensor  # sum of exp(logit - highest)
    counted_keys: Tensor  # their number so far
    out: Tensor  # [n, R, Dv]: sum of values, weighted as in `total`


class RowSums(NamedTuple):
    """Sums over the keys of rows `[B, H, Tq]`, by which their gradients can be corrected."""

    grad_scores: Tensor  # 0 over whole rows, but for rounding
    distances: Tensor  # weighted: the mean distance over whole rows


class BlockScores(NamedTuple):
    """Scores of rows with a block of keys, each `[n, R, K]`; the same bits in forward and backward."""

    scores: Tensor  # scaled
    counted: Tensor  # bool: keys that count as distance
    kept: Tensor  # bool: keys that stay in the softmax


def _scores(
    layout: Layout, walk: Walk, index: int, rows: RowBlock, key: Tensor, options: AttentionOptions
) -> BlockScores:
    """Return the scores of one block, and which of its keys count and stay."""
    scores = torch.bmm(rows.query, key.mT).mul_(options.scale)  # [n, R, D] @ [n, D, K] -> [n, R, K]
    counted = ~(scores <= options.threshold)
    kept = ~(scores <= options.lower_cut) if options.has_margin else counted
    if not walk.whole_from <= index <= walk.whole_to:
        numbers = layout.key_numbers(index)
        seen = (rows.first[..., None] <= numbers) & (numbers <= rows.last[..., None])
        counted = counted & seen
        kept = kept & seen
    return BlockScores(scores, counted, kept)


def _add_distance(block: BlockScores, log_forget: Tensor, count: Tensor, itself: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, distances, and the number of counted keys after this block. Overwrites `scores`.

    A distance is the number of counted keys to the right, plus `itself`, which is 1 without a margin and 0 with one.
    Softmax doesn't see the difference, but with 1, S + δ would lose digits of S where several keys have distance 1.
    """
    scores, counted, kept = block
    distances = counted.to(scores.dtype).cumsum(-1)
    total = distances[..., -1]
    distances = (total + count)[..., None].sub(distances).add_(itself)
    logits = scores.addcmul_(log_forget[..., None], distances).masked_fill_(~kept, -torch.inf)
    return logits, distances, count + total


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
    margin: float,
    score_bound: float | None,
    dropout: float,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output; softmax maximum and sum `[B, H, Tq]`; the oldest key block visited per head and query block.

    Maximum and sum stay apart: their joint logarithm would cost the weights of backward a digit.
    """
    options = AttentionOptions(scale, threshold, score_bound, dropout, tolerance, margin)
    rows, stops = walk_forward(query, key, value, log_forget, first, last, seed, options)
    return rows.out, rows.highest, rows.total, stops


def walk_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor,
    last: Tensor,
    seed: Tensor,
    options: AttentionOptions,
    older: OlderKeys | None = None,
) -> tuple[RunningSoftmax, Tensor]:
    """Return the softmax state of each row `[B, H, Tq]`, with `out` divided by the sum, and the oldest key block read.

    Args:
        older: Further keys of the rows, left of these, which another call reads. A walk stops only where these don't
            count either.

    Returns:
        A `RunningSoftmax`, and `[B Hkv, blocks of queries]` int64.
    """
    layout = Layout(query, key, value, first, last)
    walks = layout.walks()
    out = query.new_empty(*query.shape[:3], layout.value_width, dtype=layout.dtype)
    highest, total, counted = (query.new_empty(query.shape[:3], dtype=layout.dtype) for _ in range(3))
    stops = torch.empty(layout.n, len(walks), dtype=torch.int64, device=query.device)
    keys, values = layout.flat_keys(key), layout.flat_keys(value)
    # A sum of values near the largest number would overflow before it is divided by the sum of the weights.
    is_large = bool(values.abs().amax() > torch.finfo(layout.dtype).max / HEADROOM)
    values = values.to(layout.dtype) / HEADROOM if is_large else values
    remaining = None
    if options.tolerance > 0:
        remaining = RemainingScores(
            keys, values, layout.key_block, layout.dtype, options.scale, options.score_bound, older
        )
    n_older = 0 if older is None else older.number
    for number, walk in enumerate(walks):
        rows = layout.row_block(walk.rows, query, log_forget)
        with without_autocast(query.device):
            b_state, stops[:, number] = _walk_forward(
                layout, walk, rows, keys, values, seed, options, remaining, n_older
            )
        layout.put(out, walk.rows, b_state.out * HEADROOM if is_large else b_state.out)
        layout.put(highest, walk.rows, b_state.highest)
        layout.put(total, walk.rows, b_state.total)
        layout.put(counted, walk.rows, b_state.counted_keys)
    return RunningSoftmax(highest, total, counted, out), stops


def _walk_forward(
    layout: Layout,
    walk: Walk,
    rows: RowBlock,
    keys: Tensor,
    values: Tensor,
    seed: Tensor,
    options: AttentionOptions,
    remaining: RemainingScores | None,
    n_older: int,
) -> tuple[RunningSoftmax, Tensor]:
    """Return the state of all rows, `out` divided by the sum, and each head's oldest key block visited."""
    norm = euclidean_norms(rows.query)
    zeros = torch.zeros_like(rows.log_forget)
    out = zeros.new_zeros(*zeros.shape, layout.value_width)
    state = RunningSoftmax(torch.full_like(zeros, -torch.inf), zeros, zeros, out)
    result = RunningSoftmax(*(torch.empty_like(x) for x in state))
    stops = torch.full((layout.n,), walk.oldest, dtype=torch.int64, device=keys.device)
    active = torch.arange(layout.n, device=keys.device)  # heads whose walk goes on

    def finish(which: Tensor) -> None:
        for whole, part in zip(result, state, strict=True):
            whole[active[which]] = part[which]

    for index in range(walk.newest, walk.oldest - 1, -1):
        heads: Tensor | slice = slice(None) if len(active) == layout.n else active
        b_key = keys[heads, layout.keys_of(index)].to(layout.dtype)
        b_value = values[heads, layout.keys_of(index)].to(layout.dtype)
        state = _step_forward(layout, walk, index, rows, b_key, b_value, seed, options, state)
        if remaining is None or index == walk.oldest:
            continue
        keys_left = ((rows.last + 1).clamp(max=index * layout.key_block) - rows.first).clamp(min=0).to(layout.dtype)
        keys_left = torch.where(rows.last >= rows.first, keys_left + n_older, keys_left)
        largest_score = remaining.left_of(index, norm, heads).to(layout.dtype)
        margin_threshold = options.threshold if options.has_margin else None
        bound = log_remaining_weight(rows.log_forget, state.counted_keys, keys_left, largest_score, margin_threshold)
        if options.has_margin:
            bound = bound - rows.log_forget  # because all distances are one less
        negligible = bound - state.highest - state.total.log() < math.log(options.tolerance)
        done = ((keys_left == 0) | negligible).all(-1)
        if not bool(done.any()):
            continue
        finish(done)
        stops[active[done]] = index
        active, norm, rows = active[~done], norm[~done], rows.select(~done)
        state = RunningSoftmax(*(x[~done] for x in state))
        if len(active) == 0:
            break
    finish(torch.ones(len(active), dtype=torch.bool, device=keys.device))
    divisor = torch.where(result.total == 0, 1.0, result.total)
    return result._replace(out=result.out / divisor[..., None]), stops


def _step_forward(
    layout: Layout,
    walk: Walk,
    index: int,
    rows: RowBlock,
    key: Tensor,
    value: Tensor,
    seed: Tensor,
    options: AttentionOptions,
    state: RunningSoftmax,
) -> RunningSoftmax:
    """Return the state after one key block."""
    scores = _scores(layout, walk, index, rows, key, options)
    logits, _, count = _add_distance(scores, rows.log_forget, state.counted_keys, 1 - options.has_margin)
    highest = torch.maximum(state.highest, logits.amax(-1))
    reference = torch.where(highest == -torch.inf, 0.0, highest)
    weights = logits.sub_(reference[..., None]).exp_()
    shrink = torch.exp(state.highest - reference)
    total = state.total * shrink + weights.sum(-1)
    if options.dropout > 0:
        stays = keep_weights(seed, rows.numbers, layout.key_numbers(index), options.dropout)
        weights.mul_(stays).div_(1 - options.dropout)
    out = torch.baddbmm(state.out.mul_(shrink[..., None]), weights, value)  # [n, R, K] @ [n, K, Dv] -> [n, R, Dv]
    return RunningSoftmax(highest, total, count, out)


@_forward.register_fake
def _(query, key, value, *_rest):  # type: ignore[no-untyped-def]
    n_queries = query.shape[2]
    blocks = -(-n_queries // query_block_size(query.device, n_queries))
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
    margin: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and log_forget, in their dtypes."""
    options = AttentionOptions(scale, threshold, dropout=dropout, margin=margin)
    rows = RunningSoftmax(highest, total, torch.zeros_like(total), out)
    grads = walk_backward(grad_out, query, key, value, log_forget, first, last, seed, rows, stops, options)
    inputs = (query, key, value, log_forget)
    return tuple(torch.empty_like(x).copy_(grad) for x, grad in zip(inputs, grads, strict=True))  # type: ignore[return-value]


def walk_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    first: Tensor,
    last: Tensor,
    seed: Tensor,
    state: RunningSoftmax,
    stops: Tensor,
    options: AttentionOptions,
    sums: RowSums | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Repeat the walk for the gradients. Counts are recomputed, stops are the forward's, sums have a fixed order.

    Args:
        state: The state of whole rows. Only `counted_keys` are those right of these keys, which may be a piece of the
            row's.
        sums: Sums that are filled if given.

    Returns:
        Gradients of query, key, value and log_forget, in the dtype of sums.
    """
    dropout, scale = options.dropout, options.scale
    layout = Layout(query, key, value, first, last)
    keys, values = layout.flat_keys(key), layout.flat_keys(value)
    grad_query, grad_forget = (torch.empty(x.shape, dtype=layout.dtype, device=x.device) for x in (query, log_forget))
    grad_keys, grad_values = (torch.zeros(x.shape, dtype=layout.dtype, device=x.device) for x in (keys, values))
    for number, walk in enumerate(layout.walks()):
        rows = layout.row_block(walk.rows, query, log_forget)
        b_grad_out = layout.take(grad_out, walk.rows)
        b_highest, b_total = layout.take(state.highest, walk.rows), layout.take(state.total, walk.rows)
        empty = b_total == 0  # a row that keeps nothing has no weights to scale
        b_highest, b_total = b_highest.masked_fill(empty, 0.0), b_total.masked_fill(empty, 1.0)
        # Sum over keys of weight · its gradient. It cancels against the gradients below, hence the precision.
        inner = (b_grad_out.double() * layout.take(state.out, walk.rows).double()).sum(-1).to(layout.dtype)
        b_grad_query, b_grad_forget = torch.zeros_like(rows.query), torch.zeros_like(rows.log_forget)
        b_sums = RowSums(torch.zeros_like(b_grad_forget), torch.zeros_like(b_grad_forget))
        count = layout.take(state.counted_keys, walk.rows).clone()
        b_stops = stops[:, number].tolist()
        for index in range(walk.newest, min(b_stops) - 1, -1):
            visiting = [n for n, stop in enumerate(b_stops) if stop <= index]  # heads whose forward read this block
            on = slice(None) if len(visiting) == layout.n else torch.tensor(visiting, device=query.device)
            active, of_keys = rows.select(on), layout.keys_of(index)
            b_key, b_value = keys[on, of_keys].to(layout.dtype), values[on, of_keys].to(layout.dtype)
            block = _scores(layout, walk, index, active, b_key, options)
            itself = 1 - options.has_margin
            logits, distances, count[on] = _add_distance(block, active.log_forget, count[on], itself)
            weights = logits.sub_(b_highest[on][..., None]).exp_().div_(b_total[on][..., None])
            grad_weights = torch.bmm(b_grad_out[on], b_value.mT)  # [n, R, Dv] @ [n, Dv, K] -> [n, R, K]
            used = weights
            if dropout > 0:
                stays = keep_weights(seed, active.numbers, layout.key_numbers(index), dropout)
                used = weights * stays / (1 - dropout)
                grad_weights.mul_(stays).div_(1 - dropout)
            grad_values[on, of_keys] += torch.bmm(used.mT, b_grad_out[on])
            grad_scores = grad_weights.sub_(inner[on][..., None]).mul_(weights)
            b_grad_forget[on] += (grad_scores * distances).sum(-1)
            if sums is not None:
                b_sums.grad_scores[on] += grad_scores.sum(-1)
                b_sums.distances[on] += (weights * distances).sum(-1)
            b_grad_query[on] += torch.bmm(grad_scores, b_key).mul_(scale)
            grad_keys[on, of_keys] += torch.bmm(grad_scores.mT, active.query).mul_(scale)
        layout.put(grad_query, walk.rows, b_grad_query)
        layout.put(grad_forget, walk.rows, b_grad_forget)
        if sums is not None:
            layout.put(sums.grad_scores, walk.rows, b_sums.grad_scores)
            layout.put(sums.distances, walk.rows, b_sums.distances)
    grad_key, grad_value = (
        grad[:, : layout.n_keys].reshape(like.shape) for grad, like in ((grad_keys, key), (grad_values, value))
    )
    return grad_query, grad_key, grad_value, grad_forget


@_backward.register_fake
def _(grad_out, query, key, value, log_forget, *_rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), torch.empty_like(log_forget)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, log_forget, first, last, seed, scale, threshold, margin, _, dropout, _ = inputs
    ctx.save_for_backward(query, key, value, log_forget, first, last, seed, *output)
    ctx.options = (scale, threshold, margin, dropout)


def _autograd(ctx, grad_out, *_grads_of_the_rest):  # type: ignore[no-untyped-def]
    with without_autocast(grad_out.device):
        grads = torch.ops.tra.blockwise_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *grads, *(None,) * 9


_forward.register_autograd(_autograd, setup_context=_setup_context)
