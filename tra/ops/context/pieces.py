"""Attend to a piece of the keys, in PyTorch or by the kernels, and merge neighbouring pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.block_layout import Layout
from tra.ops.blockwise import RowSums, RunningSoftmax, walk_backward, walk_forward
from tra.ops.options import AttentionOptions
from tra.ops.stop_bound import OlderKeys
from tra.ops.triton import launch
from tra.ops.triton.backward import Gradients, run_backward
from tra.ops.triton.forward import run_forward
from tra.ops.triton.launch import ForwardState

NULL_REFERENCE = 1e30
"""The kernels' reference of a row that keeps nothing."""


class PieceInputs(NamedTuple):
    """Rows and a piece of their keys; n is batch x key heads, G the query heads of a key head."""

    query: Tensor  # [n, G, R, D]
    key: Tensor  # [n, 1, K, D]
    value: Tensor  # [n, 1, K, Dv]
    log_forget: Tensor  # [n, G, R]
    first: Tensor | None  # [n, R]: first visible key; None: queries and keys are of the same tokens, in causal order
    last: Tensor | None

    def ranges(self) -> tuple[Tensor, Tensor]:
        """Return the first and the last visible key of each row."""
        if self.first is not None and self.last is not None:
            return self.first, self.last
        last = torch.arange(self.query.shape[2], device=self.query.device).expand(len(self.query), -1)
        return torch.zeros_like(last), last


class PieceResult(NamedTuple):
    """The state of rows after they have read a piece, from its newest key on."""

    rows: RunningSoftmax  # [n, G, R]; `out` is divided by `total`, and logits are as if there were no other keys
    stops: Tensor  # where walks stopped, in the implementation's form
    stopped: Tensor  # [n, 1 or G, R] bool: neither the rest of the piece nor any older key counts


def merge(newer: RunningSoftmax, older: RunningSoftmax, log_forget: Tensor) -> RunningSoftmax:
    """Return the state of rows over two neighbouring pieces. Logits of the older move by δ x the newer's count."""
    moved = older.highest + log_forget * newer.counted_keys
    highest = torch.maximum(newer.highest, moved)
    reference = torch.where(highest == -torch.inf, 0.0, highest)
    of_newer, of_older = newer.total * (newer.highest - reference).exp(), older.total * (moved - reference).exp()
    total = of_newer + of_older
    divisor = torch.where(total == 0, 1.0, total)
    out = newer.out * (of_newer / divisor)[..., None] + older.out * (of_older / divisor)[..., None]
    return RunningSoftmax(highest, total, newer.counted_keys + older.counted_keys, out)


class BlockwisePieces:
    """Pieces computed by the walk in PyTorch."""

    @staticmethod
    def has_distances_less_one(query: Tensor, options: AttentionOptions) -> bool:
        """Return whether `highest` is that of logits whose distances are one less."""
        return options.has_margin

    @staticmethod
    def forward(inputs: PieceInputs, options: AttentionOptions, older: OlderKeys) -> PieceResult:
        first, last = inputs.ranges()
        rows, stops = walk_forward(
            *inputs[:4], first, last, _no_seed(inputs.query), options, older if options.tolerance > 0 else None
        )
        layout = Layout(*inputs[:3], first, last)
        oldest = torch.tensor([walk.oldest for walk in layout.walks()], device=stops.device)
        stopped = (stops > oldest).repeat_interleave(layout.query_block, dim=1)[:, : layout.n_queries]
        return PieceResult(rows, stops, (stopped & (first <= last))[:, None])

    @staticmethod
    def backward(
        grad_out: Tensor,
        inputs: PieceInputs,
        rows: RunningSoftmax,
        stops: Tensor,
        options: AttentionOptions,
    ) -> tuple[Sequence[Tensor], RowSums | None]:
        """Return the gradients, and sums to correct them by.

        Args:
            rows: The state of whole rows. Only the counted keys are those right of the piece.
        """
        sums = RowSums(torch.empty_like(rows.total), torch.empty_like(rows.total))
        seed = _no_seed(inputs.query)
        return walk_backward(grad_out, *inputs[:4], *inputs.ranges(), seed, rows, stops, options, sums), sums


class TritonPieces:
    """Pieces computed by the kernels."""

    @staticmethod
    def has_distances_less_one(query: Tensor, options: AttentionOptions) -> bool:
        """Return whether `highest` is that of logits whose distances are one less."""
        return options.has_margin or launch.needs_running_maximum(query.dtype, options)

    @staticmethod
    def forward(inputs: PieceInputs, options: AttentionOptions, older: OlderKeys) -> PieceResult:
        query, key, value, log_forget, first, last = _for_kernels(inputs)
        if key.shape[2] <= launch.MAX_FULL_WALK_KEYS:
            options = replace(options, tolerance=0.0)
        reference, total, counted = (torch.empty(query.shape[:3], device=query.device) for _ in range(3))
        out = torch.empty(*query.shape[:3], value.shape[3], device=query.device)
        stops = torch.empty(query.shape[:3], dtype=torch.int32, device=query.device)
        state = ForwardState(out, out.new_empty(0), reference, total, stops)
        run_forward(state, query, key, value, log_forget, first, last, None, options, older=older, counted=counted)
        is_null = reference >= NULL_REFERENCE
        if query.dtype != torch.float32:  # the reference includes the sum, in powers of two
            reference, total = reference / launch.logit_unit(query.dtype), torch.ones_like(reference)
        rows = RunningSoftmax(reference.masked_fill(is_null, -torch.inf), total.masked_fill(is_null, 0.0), counted, out)
        if first is None or last is None:
            return PieceResult(rows, stops, stops > 0)
        # A walk that read all that its rows see ends at a whole block, not beyond its first key.
        return PieceResult(rows, stops, (stops > first[:, None]) & (first <= last)[:, None])

    @staticmethod
    def backward(
        grad_out: Tensor,
        inputs: PieceInputs,
        rows: RunningSoftmax,
        stops: Tensor,
        options: AttentionOptions,
    ) -> tuple[Sequence[Tensor], RowSums | None]:
        """See `BlockwisePieces`."""
        query, key, value, log_forget, first, last = _for_kernels(inputs)
        is_null, reference, total = rows.total == 0, rows.highest, torch.where(rows.total == 0, 1.0, rows.total)
        if query.dtype != torch.float32:
            reference = (reference + total.log()) * launch.logit_unit(query.dtype)
        out = rows.out.to(query.dtype)
        out_error = (rows.out - out).to(query.dtype)
        grads = Gradients(*(torch.empty(x.shape, device=x.device) for x in (query, key, value, log_forget)))
        run_backward(
            grads, grad_out, query, key, value, log_forget, first, last, None,
            ForwardState(out, out_error, reference.masked_fill(is_null, NULL_REFERENCE), total, stops),
            options, options.tolerance > 0, counted_right=rows.counted_keys.contiguous(),
        )  # fmt: skip
        return grads, None


Pieces = BlockwisePieces | TritonPieces


def _for_kernels(inputs: PieceInputs) -> PieceInputs:
    """Return the ranges as the kernels read them."""
    if inputs.first is None or inputs.last is None:
        return inputs
    first, last = (x.to(torch.int32).contiguous() for x in (inputs.first, inputs.last))
    return inputs._replace(first=first, last=last)


def _no_seed(query: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=query.device)
