"""The forget gate of TRA and of the Forgetting Transformer: log σ(w · x + b), one per token and head."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tra.attention.shared.fusing import check_plain_parts
from tra.ops.inputs import autocast_dtype, without_autocast

MAX_HEADS_FOR_SUMS = 16
"""Heads up to which a compiled gate is a sum per head, which the compiler fuses into the kernel that makes x. As a
product in float32 it needs kernels of its own, which cost more than all else that a gate adds to a step."""


class GateLinear(nn.Linear):
    """A linear layer that computes in its input's dtype, whatever the dtype of its weights.

    Args:
        initial_bias: Initial bias of every head.
    """

    def __init__(self, d_model: int, n_heads: int, initial_bias: float) -> None:
        self.initial_bias = initial_bias  # before nn.Linear's, which calls reset_parameters
        super().__init__(d_model, n_heads)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.bias, self.initial_bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class ForgetGate(nn.Module):
    """`[B, T, d_model]` -> `[B, H, T]`, at most 0.

    Args:
        bias: Initial bias.
        fused: Let the compiler fuse the gate on a GPU, which reads the weight of `linear` and doesn't call it.
    """

    fused_methods: ClassVar[tuple[str, ...]] = ()

    def __init__(self, d_model: int, n_heads: int, bias: float, *, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.linear = GateLinear(d_model, n_heads, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return log σ in float32 also under autocast, as distances multiply its error, of the x projections see.

        Uncompiled, on a GPU, that is TF32 where PyTorch is told so for products of float32.
        """
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cast_to = autocast_dtype(x)
        x = x if cast_to is None else x.to(cast_to)
        narrow = torch.bfloat16 if cast_to == torch.bfloat16 else dtype  # float16 needs its loss scaled
        with without_autocast(x.device):
            if self.fused and sums_are_best(x, self.linear.out_features):
                check_plain_parts(self, {"linear": GateLinear})
                weight, bias = self.linear.weight.to(dtype), self.linear.bias.to(dtype)
                return log_gate_by_sums(x.to(dtype), weight, bias, narrow)
            return F.logsigmoid(self.linear(x.to(dtype))).transpose(1, 2)


def sums_are_best(x: Tensor, n_heads: int) -> bool:
    """Return whether to compute a gate as sums."""
    return x.is_cuda and n_heads <= MAX_HEADS_FOR_SUMS and torch.compiler.is_compiling()


def log_gate_by_sums(x: Tensor, weight: Tensor, bias: Tensor, narrow: torch.dtype) -> Tensor:
    """Return `F.logsigmoid(F.linear(x, weight, bias))` `[B, H, T]`, as sums that a compiler can fuse.

    The gradients have the precision of a layer's in `narrow`, as under autocast.
    """
    out: Tensor = _Sums.apply(x, weight, bias, narrow)
    return out


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, narrow: torch.dtype) -> Tensor:
        out = torch.stack([F.logsigmoid((x * row).sum(-1) + b) for row, b in zip(weight, bias, strict=True)], dim=1)
        ctx.save_for_backward(x.to(narrow), weight, out)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, out = ctx.saved_tensors
        grad = grad * -torch.expm1(out)  # 1 - σ
        grad_weight = grad.transpose(0, 1).flatten(1).to(x.dtype) @ x.flatten(0, 1)  # [H, B T] @ [B T, d_model]
        grad_x = sum(grad[:, head, :, None] * row for head, row in enumerate(weight))  # the compiler fuses the sum
        return grad_x, grad_weight.to(weight.dtype), grad.sum((0, 2)), None
