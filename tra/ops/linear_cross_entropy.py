"""The last layer of a language model and its loss in one, so that the logits of all tokens are never held at once.

With 50,000 ids the logits are a hundred times as wide as the layer's input. So rows are taken in pieces: product,
softmax, and, since the loss is a scalar, the gradient as well, after which a piece's logits are no longer needed. The
idea is that of Liger's fused linear cross entropy (Hsu et al. 2024); the code is our own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.ops.forward_mode import refuse_forward_mode
from tra.ops.triton.launch import device_guard

MAX_PIECE_BYTES = 2**29
"""Most bytes of logits held at a time, on a GPU; a sixteenth of it on a CPU."""


class LinearLoss(NamedTuple):
    """The loss, and its parts."""

    loss: Tensor  # scalar float32: sum of row_weights times losses. The only one with a gradient
    losses: Tensor  # [N] float32
    right: Tensor  # [N] bool: the target is the likeliest id


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, row_weights: Tensor) -> LinearLoss:
    """Return the cross entropy of `softmax(x · weightᵀ)`, row by row and as a weighted sum.

    Args:
        x: `[N, D]`, the input of the last layer.
        weight: `[V, D]`, the last layer. Under autocast both are cast to its dtype.
        targets: `[N]` ids in 0..V-1, also where the weight is 0.
        row_weights: `[N]` float32: the weight of a row in the sum, such as 1 / N; 0 where nothing is predicted.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x [N, D] and weight [V, D] don't fit: got {tuple(x.shape)} and {tuple(weight.shape)}")
    if targets.shape != x.shape[:1] or row_weights.shape != x.shape[:1]:
        raise ValueError(
            f"targets and row_weights must be [{len(x)}], got {tuple(targets.shape)} and {tuple(row_weights.shape)}"
        )
    refuse_forward_mode("linear_cross_entropy")
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    with_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss, losses, right, _, _ = _op(x, weight, targets, row_weights, with_gradient)
    return LinearLoss(loss, losses, right)


def rows_at_once(rows: int, vocabulary: int, element_bytes: int, piece_bytes: int) -> int:
    """Return the rows of equal pieces, a multiple of 128, whose logits stay within the bytes."""
    largest = max(128, piece_bytes // (vocabulary * element_bytes) // 128 * 128)
    pieces = -(-rows // largest)
    return -(-rows // (128 * pieces)) * 128


@torch.library.custom_op("tra::linear_cross_entropy", mutates_args=())
def _op(
    x: Tensor, weight: Tensor, targets: Tensor, row_weights: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    piece_bytes = MAX_PIECE_BYTES if x.is_cuda else MAX_PIECE_BYTES // 16
    rows = rows_at_once(len(x), len(weight), x.element_size(), piece_bytes)
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    right = torch.empty(len(x), dtype=torch.bool, device=x.device)
    x_gradient = torch.empty_like(x) if with_gradient else x.new_empty(0)
    weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if with_gradient else weight.new_empty(0).float()
    for start in range(0, len(x), rows):
        piece = slice(start, start + rows)
        logits = x[piece] @ weight.t()  # [M, D] @ [D, V] -> [M, V]
        of_rows = _softmax_rows(logits, targets[piece], row_weights[piece], with_gradient)
        losses[piece], right[piece] = of_rows.losses, of_rows.right
        if with_gradient:
            torch.mm(of_rows.gradient, weight, out=x_gradient[piece])  # [M, V] @ [V, D] -> [M, D]
            if x.is_cuda and x.dtype != torch.float32:
                weight_gradient += torch.mm(of_rows.gradient.t(), x[piece], out_dtype=torch.float32)
            else:
                weight_gradient += of_rows.gradient.t() @ x[piece]  # [V, M] @ [M, D] -> [V, D]
    return torch.dot(losses, row_weights), losses, right, x_gradient, weight_gradient


@_op.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, row_weights: Tensor, with_gradient: bool) -> tuple[Tensor, ...]:
    losses = x.new_empty(len(x), dtype=torch.float32)
    gradients = (torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32))
    if not with_gradient:
        gradients = (x.new_empty(0), weight.new_empty(0, dtype=torch.float32))
    return losses.new_empty(()), losses, torch.empty_like(losses, dtype=torch.bool), *gradients


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[3], output[4])
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, outer: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
    gradients = ((outer * gradient).to(dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
    return *gradients, None, None, None


_op.register_autograd(_backward, setup_context=_setup)


class _RowLosses(NamedTuple):
    losses: Tensor
    right: Tensor
    gradient: Tensor  # the logits' memory


def _softmax_rows(logits: Tensor, targets: Tensor, row_weights: Tensor, with_gradient: bool) -> _RowLosses:
    if logits.is_cuda:
        return _by_kernel(logits, targets, row_weights, with_gradient)
    full = logits.float()
    losses = F.cross_entropy(full, targets, reduction="none")
    right = full.argmax(-1) == targets
    if with_gradient:
        gradient = full.softmax(-1)
        gradient.scatter_add_(-1, targets[:, None], -torch.ones_like(losses)[:, None])
        logits = (gradient * row_weights[:, None]).to(logits.dtype)
    return _RowLosses(losses, right, logits)


def _by_kernel(logits: Tensor, targets: Tensor, row_weights: Tensor, with_gradient: bool) -> _RowLosses:
    from tra.ops.triton.cross_entropy_kernel import cross_entropy_kernel

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    right = torch.empty(len(logits), dtype=torch.int8, device=logits.device)
    with device_guard(logits.device):
        cross_entropy_kernel[(len(logits),)](
            logits, targets.contiguous(), row_weights.contiguous(), losses, right, logits.stride(0), logits.shape[1],
            GRADIENT=with_gradient, BV=4096, num_warps=8,
        )  # fmt: skip
    return _RowLosses(losses, right.bool(), logits)
