"""Threshold Relative Attention (Opper et al. 2025): the drop-in layer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention._base import Attention, document_numbers
from tra.naming import unknown_name
from tra.ops import (
    IMPLEMENTATIONS,
    attention_map,
    threshold_relative_attention,
    threshold_relative_attention_varlen,
)
from tra.ops._inputs import check_options


class ThresholdRelativeAttention(Attention):
    """Keys below a threshold leave the softmax, and distance counts only the keys that remain.

    Args:
        d_model, n_heads, n_kv_heads, qk_norm, dropout: See `Attention`; queries and keys are normalised by default.
        gate_bias: Initial bias of the forget gate. At 0 a head of width 64 forgets after some 37 kept keys.
        threshold: A key stays when its scaled score is above it.
        tolerance: Largest relative weight an early stop may leave out; None is what rounding hides anyway.
        impl: Implementation of the operator, see `tra.threshold_relative_attention`.
    """

    default_qk_norm: ClassVar[bool] = True
    config_fields: ClassVar[tuple[str, ...]] = ("gate_bias",)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        qk_norm: bool | None = None,
        dropout: float = 0.0,
        gate_bias: float = 0.0,
        threshold: float = 0.0,
        tolerance: float | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, qk_norm=qk_norm, dropout=dropout)
        check_options(1.0, threshold, None, dropout, tolerance)
        if impl not in IMPLEMENTATIONS:
            raise ValueError(unknown_name("impl", impl, IMPLEMENTATIONS))
        self.threshold, self.tolerance, self.impl = threshold, tolerance, impl
        self.gate = nn.Linear(d_model, n_heads)
        nn.init.constant_(self.gate.bias, gate_bias)

    def log_forget(self, x: Tensor) -> Tensor:
        """δ, `[B, T, d_model]` -> `[B, H, T]`, in float32 also under autocast: distances multiply its error."""
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            gate = F.linear(x.to(dtype), self.gate.weight.to(dtype), self.gate.bias.to(dtype))
        return F.logsigmoid(gate).transpose(1, 2)

    def attend(
        self,
        x: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> Tensor:
        options: dict[str, Any] = {
            "threshold": self.threshold,
            # After the norm no score exceeds √D, but for the rounding of bf16.
            "score_bound": math.sqrt(self.head_width) * (1 + 2**-7) if self.qk_norm else None,
            "dropout": self.dropout if self.training else 0.0,
            "tolerance": self.tolerance,
            "impl": self.impl,
        }
        log_forget = self.log_forget(x)
        if document_ids is None:
            return threshold_relative_attention(query, key, value, log_forget, key_mask=key_mask, **options)
        # [B, H, T, ·] -> [B T, H, ·]: rows become further documents of one packed row
        query, key, value, log_forget = (y.transpose(1, 2).flatten(0, 1) for y in (query, key, value, log_forget))
        ends = _document_ends(document_ids)
        out = threshold_relative_attention_varlen(query, key, value, log_forget, ends, **options)
        return out.unflatten(0, (x.shape[0], -1)).transpose(1, 2)

    @torch.no_grad()
    def statistics(self, x: Tensor, key_mask: Tensor | None = None) -> dict[str, Tensor]:
        """What each head does with an input `[B, T, d_model]`, over real queries: tensors `[H]`.

        Returns:
            `kept`: the fraction of visible keys kept; `null`: the fraction of rows that keep none;
            `log_forget`: the mean of δ.
        """
        query, key, _ = self.project(x, key_mask)
        log_forget = self.log_forget(x)
        kept = attention_map(query, key, log_forget, threshold=self.threshold, key_mask=key_mask).kept
        real = torch.ones_like(x[..., 0], dtype=torch.bool) if key_mask is None else key_mask
        seen = real[:, None].expand(-1, x.shape[1], -1).tril() & real[..., None]  # [B, Tq, Tk]
        rows = real[:, None]
        return {
            "kept": (kept & seen[:, None]).sum((0, 2, 3)) / seen.sum(),
            "null": (~kept.any(-1) & rows).sum((0, 2)) / rows.sum(),
            "log_forget": (log_forget * rows).sum((0, 2)) / rows.sum(),
        }


def _document_ends(document_ids: Tensor) -> Tensor:
    """`[B T + 1]` int32: where documents start, then the total, repeated: a shape that no data changes."""
    number = document_numbers(document_ids)
    starts = F.pad(number.diff(dim=1) != 0, (1, 0), value=True).flatten()
    total = starts.numel()
    index = torch.arange(total, device=starts.device, dtype=torch.int32)
    edges = torch.where(starts, index, total).sort().values
    return F.pad(edges, (0, 1), value=total)
