"""The forget gate of TRA and of the Forgetting Transformer: log σ(w · x + b), one per token and head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tra.ops.inputs import is_cast, layer_dtype

FEW_HEADS = 16
"""Up to here a compiled gate is a sum per head, which the compiler works out in the kernel that makes x. As a product
in float32 it has kernels of its own, which cost more than all else that a gate adds to a step."""


class ForgetGate(nn.Linear):
    """`[B, T, d_model]` -> `[B, H, T]`, at most 0.

    Args:
        bias: Initial bias.
    """

    def __init__(self, d_model: int, n_heads: int, bias: float) -> None:
        super().__init__(d_model, n_heads)
        nn.init.constant_(self.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        """In float32 also under autocast, as distances multiply its error, of the x that other projections see.

        Uncompiled, on a GPU, that is TF32 where PyTorch is told so for products of float32.
        """
        device, dtype = x.device.type, torch.float64 if x.dtype == torch.float64 else torch.float32
        cast, x = is_cast(x), x.to(layer_dtype(x))
        narrow = None
        if sums_are_best(x, self.out_features):
            narrow = torch.bfloat16 if cast and x.dtype == torch.bfloat16 else dtype  # float16 needs its loss scaled
        with torch.autocast(device, enabled=False):
            x, weight, bias = (y.to(dtype) for y in (x, self.weight, self.bias))
            if narrow is not None:
                return log_gate_by_sums(x, weight, bias, narrow)
            return F.logsigmoid(F.linear(x, weight, bias)).transpose(1, 2)


def sums_are_best(x: Tensor, n_heads: int) -> bool:
    return x.is_cuda and n_heads <= FEW_HEADS and torch.compiler.is_compiling()


def log_gate_by_sums(x: Tensor, weight: Tensor, bias: Tensor, narrow: torch.dtype) -> Tensor:
    """The same, for the compiler; its gradients have the precision of a layer's in `narrow`, as under autocast."""
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
        grad_x = sum(grad[:, head, :, None] * row for head, row in enumerate(weight))  # joins what is added to it
        return grad_x, grad_weight.to(weight.dtype), grad.sum((0, 2)), None
