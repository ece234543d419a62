"""The base of all mechanisms: projections, norm and rotation of queries and keys, the cache and the attention map."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention.shared.arguments import constructor_arguments
from tra.attention.shared.cache import LayerCache, PackedLayer
from tra.attention.shared.forget_gate import ForgetGate, GateLinear
from tra.attention.shared.fusing import check_plain_parts, one_product_is_best
from tra.attention.shared.inputs import AttentionInputs, check_masks, scores, visible_keys
from tra.attention.shared.positions import positions
from tra.attention.shared.rotation import rotate_by_position
from tra.ops.context.parts import SequenceParts

NORM_EPS = 1e-6
"""Added to mean squares in the norm of queries and keys."""

FUSED_PARTS = dict.fromkeys(("q_proj", "k_proj", "v_proj"), nn.Linear) | {
    "gate": ForgetGate,
    "gate.linear": GateLinear,
}
"""The modules whose weights a fused layer reads itself, and their classes."""


COMMON_ARGUMENTS = (
    "d_model", "n_heads", "n_kv_heads", "qk_norm", "rotary", "rope_theta", "dropout", "fuse_projections"
)  # fmt: skip
"""Arguments that the decoder passes to every mechanism."""


class WeightMap(NamedTuple):
    """The weights of queries over all keys, and what they are made of, each `[B, H, rows, Tk]`."""

    weights: Tensor
    """Factors of the values; 0 where a key is not visible."""
    content: Tensor
    """Scaled products of query and key, without position."""
    logits: Tensor
    """Content and position together, which rank the keys; -inf where a key is not visible, or dropped."""


class Mechanism(nn.Module):
    """The base of all mechanisms: the properties that the decoder reads."""

    config_fields: ClassVar[tuple[str, ...]] = ()
    """Arguments of the mechanism's own: fields of `DecoderConfig` of the same name, or "layer", the layer's number."""
    marks_input: ClassVar[bool] = False
    """Positions are added to the decoder's input, by `mark_input`."""
    orders_by_content: ClassVar[bool] = True
    """Without position, the order of its keys would be that of its content scores."""
    replaces_mlp: ClassVar[bool] = False
    """It replaces a whole block, not the block's attention alone."""
    takes_key_lengths: ClassVar[bool] = False
    """It can read the first keys of a longer buffer, a number per row that only the device knows: a static cache."""
    takes_pages: ClassVar[bool] = False
    """The mechanism can read keys in pages, of which a query sees a window. Bounded caches and serving need that."""
    takes_parts: ClassVar[bool] = False
    """The mechanism can attend to a sequence that several processes share, see `tra.ops.SequenceParts`."""
    keeps_state: ClassVar[bool] = False
    """Its cache holds a state of all tokens so far, out of which none can be taken again."""

    @classmethod
    def own_arguments(cls) -> dict[str, inspect.Parameter]:
        """Return the constructor's arguments that can be set by `DecoderConfig.arguments`."""
        others = {*COMMON_ARGUMENTS, *cls.config_fields}
        return {name: parameter for name, parameter in constructor_arguments(cls).items() if name not in others}

    def attention_map(self, x: Tensor, key_mask: Tensor | None = None, rows: Tensor | None = None) -> WeightMap:
        raise ValueError(f"{type(self).__name__} has no attention map")

    @staticmethod
    def mark_input(x: Tensor, position: Tensor) -> Tensor:
        """Add positions `[B or 1, T]` to embeddings `[B, T, d_model]`, where a mechanism `marks_input`."""
        raise NotImplementedError


class Attention(Mechanism):
    """Causal self-attention with everything but the mechanism.

    A mechanism overrides `attend`, the fast path, and `logits` and `weigh`, which its attention map is computed from.

    Args:
        d_model: Width of the input and the output.
        n_heads: Query heads; their width is `d_model / n_heads`.
        n_kv_heads: Key and value heads, each shared by `n_heads / n_kv_heads` query heads; n_heads by default.
        qk_norm: RMS-normalise queries and keys, without a learned scale; None is the mechanism's published choice.
        rotary: Rotate queries and keys by their position; None is the mechanism's published choice.
        rope_theta: Base of the rotation's wavelengths.
        dropout: Rate on the attention weights, in training.
        fuse_projections: In training, multiply by the weights of projections and gate themselves where that is
            faster, in place of calling them as modules. With an adapter, hook or other module in their place, a
            training step then raises a ValueError.
    """

    default_qk_norm: ClassVar[bool] = False
    default_rotary: ClassVar[bool] = False
    fused_methods: ClassVar[tuple[str, ...]] = ()
    """Methods that a fused operator does not call."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        qk_norm: bool | None = None,
        rotary: bool | None = None,
        rope_theta: float = 500_000.0,
        dropout: float = 0.0,
        fuse_projections: bool = False,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if min(d_model, n_heads, n_kv_heads) < 1:
            raise ValueError(
                f"d_model, n_heads and n_kv_heads must be at least 1, got {d_model}, {n_heads} and {n_kv_heads}"
            )
        if d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads, got {d_model} and {n_heads}")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads, got {n_heads} and {n_kv_heads}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
        self.n_heads, self.n_kv_heads, self.head_width = n_heads, n_kv_heads, d_model // n_heads
        self.qk_norm = self.default_qk_norm if qk_norm is None else qk_norm
        self.rotary = self.default_rotary if rotary is None else rotary
        self.rope_theta = rope_theta
        if self.rotary and self.head_width % 2:
            raise ValueError(f"rotation needs an even head width, got {self.head_width}")
        self.dropout = dropout
        self.fuse_projections = fuse_projections
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        cache: LayerCache | PackedLayer | None = None,
        document_ids: Tensor | None = None,
        with_map: bool = False,
        parts: SequenceParts | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the layer's output, `[B, T, d_model]` -> the same.

        Args:
            key_mask: `[B, cached + T]` bool, False at padding, which may stand anywhere.
            cache: The keys and values of earlier tokens, to which those of the new tokens are added.
            document_ids: `[B, T]`: tokens see only their own document, which ends where the id changes.
            with_map: Also return the attention weights, see `attend_with_map`.
            parts: How processes share the sequence, of which x is this one's part; without cache or map.
        """
        if self.fuse_projections and torch.is_grad_enabled():
            check_plain_parts(self, FUSED_PARTS)
        if with_map:
            if parts is not None:
                raise ValueError("with_map needs the whole sequence in one process")
            out, weights = self.attend_with_map(self.prepare_inputs(x, key_mask, cache, document_ids))
            return self.o_proj(out.transpose(1, 2).flatten(2)), weights
        if parts is None:
            out = self.project_and_attend(x, key_mask, cache, document_ids)
        elif cache is not None:
            raise ValueError("a sequence that processes share doesn't go with a cache")
        else:
            parts = parts if document_ids is None else parts.with_documents(document_ids)
            out = self.attend_to_parts(x, key_mask, parts)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def project_and_attend(self, x: Tensor, *context: Any) -> Tensor:
        """Return what `o_proj` reads, `[B, H, T, D]`; `context` is the rest of the arguments of `forward`."""
        return self.attend(self.prepare_inputs(x, *context))

    def attend_to_parts(self, x: Tensor, key_mask: Tensor | None, parts: SequenceParts) -> Tensor:
        """Return the attention's output before `o_proj`, `[B, H, T, D]`, in a sequence that processes share."""
        raise ValueError(f"{type(self).__name__} can't attend to a sequence that processes share: use tra")

    def prepare_inputs(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        cache: LayerCache | PackedLayer | None = None,
        document_ids: Tensor | None = None,
    ) -> AttentionInputs:
        """Return queries of the new tokens, keys and values of all tokens, and their masks."""
        past = 0 if cache is None else cache.length
        if x.ndim != 3 or x.shape[2] != self.q_proj.in_features:
            raise ValueError(f"x must be [B, T, {self.q_proj.in_features}], got {tuple(x.shape)}")
        if key_mask is not None or document_ids is not None:
            check_masks(x, key_mask, past, document_ids)
        if document_ids is not None and cache is not None:
            raise ValueError("document_ids are for packed training rows and don't go with a cache")
        query, key, value = self.project_heads(x)
        if self.rotary:
            position = positions(x, key_mask, past) if cache is None else cache.positions(x, key_mask)
            query, key = rotate_by_position((query, key), position, self.rope_theta)
        if cache is None:
            return AttentionInputs(x, query, key, value, key_mask, document_ids, None)
        key, value, key_mask, key_lengths, pages = cache.add(key, value, key_mask)
        if key_lengths is not None and not self.takes_key_lengths:
            raise ValueError(f"{type(self).__name__} can't use a static cache: decode with a growing one")
        if pages is not None and self.dropout_now > 0:
            raise ValueError("keys in pages are for inference: call eval() on the model, which has dropout")
        masks = {"key_mask": key_mask, "document_ids": document_ids, "key_lengths": key_lengths}
        return AttentionInputs(x, query, key, value, **masks, cache=cache, pages=pages)

    def project_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[B, H, T, D]`, keys and values `[B, Hkv, T, D]`, normalised but not rotated."""
        query, key, value = self.project(x)
        if self.qk_norm:  # before heads move to the front: a compiler reads and writes them once, in their own layout
            query, key = (F.rms_norm(y, (self.head_width,), eps=NORM_EPS).to(value.dtype) for y in (query, key))
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as projected, `[B, T, heads, D]`."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        if self.fuse_projections and one_product_is_best(x):
            check_plain_parts(self, FUSED_PARTS)
            joint = F.linear(x, torch.cat([layer.weight for layer in layers]))
            query, key, value = joint.split([layer.out_features for layer in layers], dim=-1)
        else:
            query, key, value = (layer(x) for layer in layers)
        # Tensor parallelism leaves each process some of the heads.
        query, key, value = (y.unflatten(-1, (-1, self.head_width)) for y in (query, key, value))
        return query, key, value

    @property
    def dropout_now(self) -> float:
        """The dropout rate of the current mode: 0 in evaluation."""
        return self.dropout if self.training else 0.0

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Return what the queries read, `[B, H, Tq, D]`."""
        raise NotImplementedError

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        """Return what `weigh` normalises over keys, for queries `rows` `[R]`: `[B, H, R, Tk]`, -inf at hidden keys."""
        return scores(inputs, rows).masked_fill(~visible_keys(inputs, rows), -torch.inf)

    def weigh(self, logits: Tensor) -> Tensor:
        """Turn logits into weights."""
        return logits.softmax(-1)

    def attend_with_map(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return what the queries read, and the weights `[B, H, Tq, Tk]` that values were weighed with.

        Gradients flow through the weights, unlike in `attention_map`. Computed without autocast, from `logits`, so it
        equals `attend` up to rounding. Memory is `B · H · Tq · Tk`. Not for static caches.
        """
        with torch.autocast(inputs.x.device.type, enabled=False):
            weights = self.weigh(self.logits(inputs, torch.arange(inputs.query.shape[2], device=inputs.x.device)))
            value = inputs.value.repeat_interleave(weights.shape[1] // inputs.value.shape[1], dim=1)
            return F.dropout(weights, self.dropout_now).to(value.dtype) @ value, weights

    @torch.no_grad()
    def attention_map(self, x: Tensor, key_mask: Tensor | None = None, rows: Tensor | None = None) -> WeightMap:
        """Return weights, content scores and logits of an input `[B, T, d_model]`, for queries `rows` `[R]` or all.

        Computed without autocast. Memory is `B · H · R · T`, so ask for few rows of a long input.
        """
        with torch.autocast(x.device.type, enabled=False):
            inputs = self.prepare_inputs(x, key_mask)
            rows = torch.arange(x.shape[1], device=x.device) if rows is None else rows
            query, key, _ = self.project_heads(x)
            logits = self.logits(inputs, rows)
            return WeightMap(self.weigh(logits), self.content(inputs._replace(query=query, key=key), rows), logits)

    def content(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        """Return scores of queries and keys without position, `[B, H, R, Tk]`."""
        return scores(inputs, rows)
