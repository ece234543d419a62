"""Threshold Relative Attention (Opper et al. 2025): the drop-in layer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tra import unknown_name
from tra.attention.shared.base import NORM_EPS, Attention, Given, is_plain
from tra.attention.shared.cache import LayerCache, StaticLayerCache
from tra.attention.shared.forget_gate import ForgetGate
from tra.attention.shared.positions import document_numbers
from tra.ops import (
    IMPLEMENTATIONS,
    attention_map,
    threshold_relative_attention,
    threshold_relative_attention_varlen,
)
from tra.ops.compiler_workarounds import softmax_or_nothing
from tra.ops.full_map import full_attention_map
from tra.ops.inputs import is_cast, layer_dtype
from tra.ops.options import AttentionOptions, default_tolerance
from tra.ops.stop_bound import log_remaining_weight
from tra.ops.triton.projections import Weights, attention_of_projections, takes_projections
from tra.ops.visible import Visible

PARTS = ("given", "heads", "projected", "log_forget", "attend")
"""Methods that one operator stands for in training."""


class ThresholdRelativeAttention(Attention):
    """Keys below a threshold leave the softmax, and distance counts only the keys that remain.

    Args:
        gate_bias: Initial bias of the forget gate. At 0 a head of width 64 forgets after some 37 kept keys.
        threshold: A key stays when its scaled score is above it.
        tolerance: Largest relative weight an early stop may leave out; None is what rounding hides anyway.
        impl: Implementation of the operator, see `tra.threshold_relative_attention`.
        options: See `Attention`; queries and keys are normalised by default.
    """

    default_qk_norm: ClassVar[bool] = True
    config_fields: ClassVar[tuple[str, ...]] = ("gate_bias",)
    takes_key_lengths: ClassVar[bool] = True
    gated: ClassVar[bool] = True
    """Without a gate, distance costs nothing."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        gate_bias: float = 0.0,
        threshold: float = 0.0,
        tolerance: float | None = None,
        impl: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        AttentionOptions(1.0, threshold, None, self.dropout, tolerance or 0.0)  # checks them
        if impl not in IMPLEMENTATIONS:
            raise ValueError(unknown_name("impl", impl, IMPLEMENTATIONS))
        self.threshold, self.tolerance, self.impl = threshold, tolerance, impl
        if self.gated:
            self.gate = ForgetGate(d_model, n_heads, gate_bias)

    @property
    def score_bound(self) -> float | None:
        """After the norm no score exceeds √D, but for the rounding of bf16."""
        return math.sqrt(self.head_width) * (1 + 2**-7) if self.qk_norm else None

    def log_forget(self, x: Tensor) -> Tensor:
        """δ, `[B, T, d_model]` -> `[B, H, T]`."""
        if self.gated:
            return self.gate(x)
        return x.new_zeros(
            x.shape[0], self.n_heads, x.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32
        )

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold,
            "score_bound": self.score_bound,
            "dropout": self.dropout_now,
            "tolerance": self.tolerance,
        }

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        cache: LayerCache | StaticLayerCache | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """See `Attention`. In plain training all up to the output's projection is one operator."""
        if key_mask is None and cache is None and document_ids is None and self._is_one_operator(x):
            self._check(x)
            gates = (self.gate.weight, self.gate.bias) if self.gated else ()
            weights = Weights(self.query.weight, self.key.weight, self.value.weight, *gates)
            x = x.to(layer_dtype(x))
            out = attention_of_projections(x, weights, n_heads=self.n_heads, eps=NORM_EPS, **self._options)
            return self.out(out.transpose(1, 2).flatten(2))
        return super().forward(x, key_mask, cache, document_ids)

    def _is_one_operator(self, x: Tensor) -> bool:
        """Where a graph is made, the kernels can be had, and nobody has put something else in the place of a part."""
        layers = [self.query, self.key, self.value]
        if not (torch.is_grad_enabled() and self.qk_norm and not self.rotary):
            return False
        if not takes_projections(x.device, layer_dtype(x), self.head_width, self.impl):
            return False
        if any(getattr(type(self), name) is not getattr(ThresholdRelativeAttention, name) for name in PARTS):
            return False
        if any(name in vars(self) for name in PARTS) or (self.gated and type(self.gate) is not ForgetGate):
            return False
        if not (is_cast(x) or all(layer.weight.dtype == x.dtype for layer in layers)):
            return False
        return all(is_plain(layer) for layer in [*layers, *([self.gate] if self.gated else [])])

    def attend(self, given: Given) -> Tensor:
        options = self._options | {"impl": self.impl}
        query, key, value, log_forget = given.query, given.key, given.value, self.log_forget(given.x)
        if given.document_ids is None:
            return threshold_relative_attention(
                query, key, value, log_forget, key_mask=given.key_mask, key_lengths=given.key_lengths, **options
            )
        # [B, H, T, ·] -> [B T, H, ·]: rows become further documents of one packed row
        query, key, value, log_forget = (y.transpose(1, 2).flatten(0, 1) for y in (query, key, value, log_forget))
        ends = _document_ends(given.document_ids)
        out = threshold_relative_attention_varlen(query, key, value, log_forget, ends, **options)
        return out.unflatten(0, (given.x.shape[0], -1)).transpose(1, 2)

    def logits(self, given: Given, rows: Tensor) -> Tensor:
        last = (given.past + rows)[None].expand(given.query.shape[0], -1)
        log_forget = self.log_forget(given.x)[:, :, rows]
        found = full_attention_map(
            given.query[:, :, rows],
            given.key,
            log_forget,
            Visible(torch.zeros_like(last), last, given.key_mask),
            AttentionOptions(self.head_width**-0.5, self.threshold),
        )
        return found.logits(log_forget)

    def weigh(self, logits: Tensor) -> Tensor:
        return softmax_or_nothing(logits)

    @torch.no_grad()
    def reach(self, x: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        """How many tokens back queries `rows` `[R]` look until the rest provably doesn't count: `[B, H, R]`.

        Args:
            x: The layer's input, `[B, T, d_model]`, without padding.
            logits: Those of the rows, as in `attention_map`.
        """
        given = self.given(x)
        longest = given.key.norm(dim=-1).amax(-1).repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
        bound = (given.query[:, :, rows].norm(dim=-1) * longest[..., None] * self.head_width**-0.5)[..., None]
        if self.score_bound is not None:
            bound = torch.full_like(bound, self.score_bound)
        tolerance = default_tolerance(logits.dtype) if self.tolerance is None else self.tolerance
        log_forget = self.log_forget(x)[:, :, rows, None].expand_as(logits)
        kept = (logits > -torch.inf).to(logits.dtype).flip(-1).cumsum(-1).flip(-1)  # from j up to the query
        weighed = logits.flip(-1).logcumsumexp(-1).flip(-1)
        left = torch.arange(logits.shape[-1], device=x.device, dtype=logits.dtype).expand_as(logits)  # keys before j
        done = log_remaining_weight(log_forget, kept, left, bound) <= weighed + math.log(max(tolerance, 1e-300))
        done |= left == 0
        done &= left <= rows[:, None]
        nearest = torch.where(done, left, -1.0).amax(-1)
        return rows - nearest + 1

    @torch.no_grad()
    def statistics(self, x: Tensor, key_mask: Tensor | None = None) -> dict[str, Tensor]:
        """What each head does with an input `[B, T, d_model]`, over real queries: tensors `[H]`.

        Returns:
            `kept`: the fraction of visible keys kept; `null`: the fraction of rows that keep none;
            `log_forget`: the mean of δ.
        """
        given, log_forget = self.given(x, key_mask), self.log_forget(x)
        kept = attention_map(given.query, given.key, log_forget, threshold=self.threshold, key_mask=key_mask).kept
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
