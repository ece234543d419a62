"""The forget gate of TRA and of the Forgetting Transformer: log σ(w · x + b), one per token and head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ForgetGate(nn.Linear):
    """`[B, T, d_model]` -> `[B, H, T]`, at most 0.

    Args:
        bias: Initial bias.
    """

    def __init__(self, d_model: int, n_heads: int, bias: float) -> None:
        super().__init__(d_model, n_heads)
        nn.init.constant_(self.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        """In float32 also under autocast: distances multiply its error."""
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            gate = F.linear(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        return F.logsigmoid(gate).transpose(1, 2)
