"""Threshold Relative Attention (Opper et al. 2025): the drop-in layer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tra import unknown_name
from tra.attention.shared.base import NORM_EPS, Attention
from tra.attention.shared.forget_gate import ForgetGate
from tra.attention.shared.fusing import check_not_overridden
from tra.attention.shared.inputs import AttentionInputs, key_positions
from tra.attention.shared.pages import Pages, attend_by_group
from tra.attention.shared.positions import document_numbers
from tra.ops import (
    IMPLEMENTATIONS,
    AttentionMap,
    SequenceParts,
    attention_map,
    context_parallel_attention,
    threshold_relative_attention,
    threshold_relative_attention_paged,
    threshold_relative_attention_varlen,
)
from tra.ops.compiler_workarounds import softmax_or_nothing
from tra.ops.forward_mode import in_forward_mode
from tra.ops.full_map import full_attention_map
from tra.ops.inputs import autocast_dtype
from tra.ops.options import AttentionOptions, default_tolerance
from tra.ops.stop_bound import log_remaining_weight
from tra.ops.triton.projections import Weights, attention_of_projections, takes_projections
from tra.ops.visible import Visible


class ThresholdRelativeAttention(Attention):
    """Keys below a threshold leave the softmax, and distance counts only the keys that remain.

    With a margin, keys that are below the threshold by less than the margin stay in the softmax without counting as
    distance.

    Args:
        gate_bias: Initial bias of the forget gate. At 0 a head of width 64 forgets after some 37 kept keys.
        threshold: A key counts as distance when its scaled score is above it.
        margin: A key stays in the softmax when its score is above `threshold - margin`; 0 is the paper's TRA.
        tolerance: Largest relative weight an early stop may leave out; None is what rounding loses in any case.
        impl: Implementation of the operator, see `tra.threshold_relative_attention`.
        options: See `Attention`; queries and keys are normalised by default.
    """

    default_qk_norm: ClassVar[bool] = True
    config_fields: ClassVar[tuple[str, ...]] = ("gate_bias", "threshold", "margin")
    takes_key_lengths: ClassVar[bool] = True
    takes_pages: ClassVar[bool] = True
    takes_parts: ClassVar[bool] = True
    fused_methods: ClassVar[tuple[str, ...]] = ("prepare_inputs", "project_heads", "project", "log_forget", "attend")
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
        margin: float = 0.0,
        tolerance: float | None = None,
        impl: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        checked = AttentionOptions(1.0, threshold, None, self.dropout, tolerance or 0.0, margin)
        self.has_margin = checked.has_margin
        if impl not in IMPLEMENTATIONS:
            raise ValueError(unknown_name("impl", impl, IMPLEMENTATIONS))
        self.threshold, self.margin, self.tolerance, self.impl = threshold, margin, tolerance, impl
        if self.gated:
            self.gate = ForgetGate(d_model, n_heads, gate_bias, fused=self.fuse_projections)
        if self.fuse_projections:
            check_not_overridden(self, ThresholdRelativeAttention)

    @property
    def score_bound(self) -> float | None:
        """The largest score after the norm: √D, and what rounding to bf16 adds."""
        return math.sqrt(self.head_width) * (1 + 2**-7) if self.qk_norm else None

    def log_forget(self, x: Tensor) -> Tensor:
        """Return δ, `[B, T, d_model]` -> `[B, H, T]`."""
        if self.gated:
            return self.gate(x)
        return x.new_zeros(
            x.shape[0], self.n_heads, x.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32
        )

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold,
            "margin": self.margin,
            "score_bound": self.score_bound,
            "dropout": self.dropout_now,
            "tolerance": self.tolerance,
        }

    def project_and_attend(self, x: Tensor, *context: Any) -> Tensor:
        """See `Attention`. In fused training without masks, projections, norm, gate and attention are one operator."""
        training = self.fuse_projections and torch.is_grad_enabled() and all(value is None for value in context)
        if training and not in_forward_mode() and self.qk_norm and not self.rotary and x.ndim == 3:
            projections = (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)
            cast_to = autocast_dtype(x)
            dtype = x.dtype if cast_to is None else cast_to
            # without autocast PyTorch raises an error for products of different dtypes, on the other path
            fits = cast_to is not None or all(weight.dtype == dtype for weight in projections)
            if fits and takes_projections(x.device, dtype, self.head_width, self.impl):
                gates = (self.gate.linear.weight, self.gate.linear.bias) if self.gated else ()
                weights = Weights(*projections, *gates)
                return attention_of_projections(
                    x.to(dtype), weights, n_heads=self.n_heads, eps=NORM_EPS, **self._options
                )
        return super().project_and_attend(x, *context)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        options = self._options | {"impl": self.impl}
        query, key, value, log_forget = inputs.query, inputs.key, inputs.value, self.log_forget(inputs.x)
        if inputs.pages is not None:
            return attend_by_group(self._attend_to_pages, inputs.pages, query, log_forget)
        if inputs.document_ids is None:
            return threshold_relative_attention(
                query, key, value, log_forget, key_mask=inputs.key_mask, key_lengths=inputs.key_lengths, **options
            )
        # [B, H, T, ·] -> [B T, H, ·]: rows become further documents of one packed row
        query, key, value, log_forget = (y.transpose(1, 2).flatten(0, 1) for y in (query, key, value, log_forget))
        ends = _document_ends(inputs.document_ids)
        out = threshold_relative_attention_varlen(query, key, value, log_forget, ends, **options)
        return out.unflatten(0, (inputs.x.shape[0], -1)).transpose(1, 2)

    def _attend_to_pages(self, query: Tensor, log_forget: Tensor, pages: Pages) -> Tensor:
        options = {name: value for name, value in self._options.items() if name != "dropout"}
        if pages.sinks:
            raise ValueError("TRA has no use for attention sinks: a query may keep no key at all; use sinks=0")
        if pages.guard is not None:
            if self.score_bound is None:
                raise ValueError("a window's guard needs the bound on scores that qk_norm=True gives")
            pages.guard.count(query, log_forget, pages, options)
        key, value, table, lengths, window = pages.keys
        return threshold_relative_attention_paged(
            query, key, value, log_forget, table, lengths, window=window, impl=self.impl, **options
        )

    def attend_to_parts(self, x: Tensor, key_mask: Tensor | None, parts: SequenceParts) -> Tensor:
        if self.rotary:
            raise ValueError("rotary=True needs positions, which a sequence that processes share doesn't have")
        options = self._options
        if options.pop("dropout") > 0:
            raise ValueError(f"a sequence that processes share has no dropout, got {self.dropout}: set it to 0")
        inputs = self.prepare_inputs(x, key_mask)
        return context_parallel_attention(
            inputs.query, inputs.key, inputs.value, self.log_forget(x), parts,
            key_mask=key_mask, impl=self.impl, **options,
        )  # fmt: skip

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        log_forget = self.log_forget(inputs.x)[:, :, rows]
        return self._full_map(inputs, rows, log_forget).logits(log_forget)

    def _full_map(self, inputs: AttentionInputs, rows: Tensor, log_forget: Tensor) -> AttentionMap:
        """Return the operator's map of the queries `rows` `[R]`, which have `log_forget` `[B, H, R]`."""
        last = (inputs.past + rows)[None].expand(inputs.query.shape[0], -1)
        first = torch.zeros_like(last) if inputs.document_ids is None else last - key_positions(inputs)[:, rows]
        return full_attention_map(
            inputs.query[:, :, rows],
            inputs.key,
            log_forget,
            Visible(first, last, inputs.key_mask),
            AttentionOptions(self.head_width**-0.5, self.threshold, margin=self.margin),
        )

    def weigh(self, logits: Tensor) -> Tensor:
        return softmax_or_nothing(logits)

    @torch.no_grad()
    def counted_keys(self, x: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        """Return which keys count as distance for queries `rows` `[R]`, `[B, H, R, T]` bool.

        Without a margin, all kept keys count.

        Args:
            x: The layer's input, `[B, T, d_model]`, without padding.
            logits: Those of the rows, as in `attention_map`.
        """
        if not self.has_margin:
            return logits > -torch.inf
        with torch.autocast(x.device.type, enabled=False):
            inputs, log_forget = self.prepare_inputs(x), self.log_forget(x)
            return self._full_map(inputs, rows, log_forget[:, :, rows]).counted

    @torch.no_grad()
    def reach(self, x: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        """Return how many tokens back queries `rows` `[R]` read before the rest provably doesn't count: `[B, H, R]`.

        Args:
            x: The layer's input, `[B, T, d_model]`, without padding.
            logits: Those of the rows, as in `attention_map`.
        """
        inputs = self.prepare_inputs(x)
        longest = inputs.key.norm(dim=-1).amax(-1).repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
        bound = (inputs.query[:, :, rows].norm(dim=-1) * longest[..., None] * self.head_width**-0.5)[..., None]
        if self.score_bound is not None:
            bound = torch.full_like(bound, self.score_bound)
        tolerance = default_tolerance(logits.dtype) if self.tolerance is None else self.tolerance
        log_forget = self.log_forget(x)[:, :, rows, None].expand_as(logits)
        count = self.counted_keys(x, logits, rows).to(logits.dtype).flip(-1).cumsum(-1).flip(-1)  # j up to the query
        log_mass = logits.flip(-1).logcumsumexp(-1).flip(-1)
        older = torch.arange(logits.shape[-1], device=x.device, dtype=logits.dtype).expand_as(logits)  # keys before j
        rest = log_remaining_weight(log_forget, count, older, bound, self.threshold if self.has_margin else None)
        can_stop = rest <= log_mass + math.log(max(tolerance, 1e-300))
        can_stop |= older == 0
        can_stop &= older <= rows[:, None]
        nearest = torch.where(can_stop, older, -1.0).amax(-1)
        return rows - nearest + 1

    @torch.no_grad()
    def statistics(self, x: Tensor, key_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return statistics of each head on input `[B, T, d_model]`, over real queries: tensors `[H]`.

        Returns:
            `kept`: the fraction of visible keys that stay in the softmax; `counted`: the fraction of visible keys that
            count as distance, equal to `kept` without a margin; `null`: the fraction of rows that keep no key;
            `log_forget`: its mean.
        """
        inputs, log_forget = self.prepare_inputs(x, key_mask), self.log_forget(x)
        found = attention_map(
            inputs.query, inputs.key, log_forget, threshold=self.threshold, margin=self.margin, key_mask=key_mask
        )
        real = torch.ones_like(x[..., 0], dtype=torch.bool) if key_mask is None else key_mask
        visible = real[:, None].expand(-1, x.shape[1], -1).tril() & real[..., None]  # [B, Tq, Tk]
        rows = real[:, None]
        return {
            "kept": (found.kept & visible[:, None]).sum((0, 2, 3)) / visible.sum(),
            "counted": (found.counted & visible[:, None]).sum((0, 2, 3)) / visible.sum(),
            "null": (~found.kept.any(-1) & rows).sum((0, 2)) / rows.sum(),
            "log_forget": (log_forget * rows).sum((0, 2)) / rows.sum(),
        }


def _document_ends(document_ids: Tensor) -> Tensor:
    """Return where documents start, then the total, repeated: `[B T + 1]` int32, a shape independent of data."""
    number = document_numbers(document_ids)
    starts = F.pad(number.diff(dim=1) != 0, (1, 0), value=True).flatten()
    total = starts.numel()
    index = torch.arange(total, device=starts.device, dtype=torch.int32)
    edges = torch.where(starts, index, total).sort().values
    return F.pad(edges, (0, 1), value=total)
