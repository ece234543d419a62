"""What all mechanisms share: projections, the norm and rotation of queries and keys, the cache, masks and the map."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from tra.attention.shared.cache import LayerCache, StaticLayerCache
from tra.attention.shared.forget_gate import ForgetGate
from tra.attention.shared.positions import document_numbers, places
from tra.attention.shared.rotation import rotate_by_place

NORM_EPS = 1e-6
"""Of the norm of queries and keys."""


class Given(NamedTuple):
    """What a mechanism works on. Queries stand at the end of the keys."""

    x: Tensor  # [B, Tq, d_model]
    query: Tensor  # [B, H, Tq, D], normalised and rotated if the mechanism does so
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, D]
    key_mask: Tensor | None  # [B, Tk]
    document_ids: Tensor | None  # [B, Tq]
    cache: Any  # a LayerCache, or what serves as one; None
    prepared: Tensor | None = None  # what a mechanism worked out once for all rows
    key_lengths: Tensor | None = None  # [B]: keys there are, where slots are free; for those who `take_key_lengths`

    @property
    def past(self) -> int:
        assert self.key_lengths is None
        return self.key.shape[2] - self.query.shape[2]


class WeightMap(NamedTuple):
    """What some queries make of all keys, each `[B, H, rows, Tk]`."""

    weights: Tensor
    """What a value is multiplied with; 0 where a key is not seen."""
    content: Tensor
    """The scaled product of query and key before position enters."""
    logits: Tensor
    """What orders the keys in the end, content and position together; -inf where a key is not seen, or dropped."""


class Mechanism(nn.Module):
    """What the decoder knows of a mechanism."""

    config_fields: ClassVar[tuple[str, ...]] = ()
    """Arguments of the mechanism's own: fields of `DecoderConfig` of the same name, or "layer", the layer's number."""
    marks_input: ClassVar[bool] = False
    """Positions are added to the decoder's input, by `mark_input`."""
    orders_by_content: ClassVar[bool] = True
    """Without position, the order of its keys would be that of its content scores."""
    replaces_mlp: ClassVar[bool] = False
    """It takes the place of a whole block, not of its attention alone."""
    takes_key_lengths: ClassVar[bool] = False
    """It can look at the first keys of a longer buffer, a number per row that only the device knows: a static cache."""
    caches_more: ClassVar[bool] = False
    """Its cache holds more than keys and values."""

    def attention_map(self, x: Tensor, key_mask: Tensor | None = None, rows: Tensor | None = None) -> WeightMap:
        raise ValueError(f"{type(self).__name__} has no attention map")

    @staticmethod
    def mark_input(x: Tensor, place: Tensor) -> Tensor:
        """Add positions `[B or 1, T]` to embeddings `[B, T, d_model]`, where a mechanism `marks_input`."""
        raise NotImplementedError


class Attention(Mechanism):
    """Causal self-attention with everything but the mechanism.

    A mechanism overrides `attend`, the fast path, and `logits` and `weigh`, from which its attention map comes.

    Args:
        d_model: Width of the input and the output.
        n_heads: Query heads; their width is `d_model / n_heads`.
        n_kv_heads: Key and value heads, each shared by `n_heads / n_kv_heads` query heads; n_heads by default.
        qk_norm: RMS-normalise queries and keys, without a learned scale; None is the mechanism's published choice.
        rotary: Rotate queries and keys by their place; None is the mechanism's published choice.
        rope_theta: Base of the rotation's wavelengths.
        dropout: Rate on the attention weights, in training.
    """

    default_qk_norm: ClassVar[bool] = False
    default_rotary: ClassVar[bool] = False

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
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, n_kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(d_model, n_kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(d_model, d_model)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        cache: LayerCache | StaticLayerCache | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """`[B, T, d_model]` -> the same.

        Args:
            key_mask: `[B, cached + T]` bool, False at padding, which may stand anywhere.
            cache: Holds the keys and values of earlier tokens, and takes those of the new ones.
            document_ids: `[B, T]`: tokens see only their own document, which ends where the id changes.
        """
        out = self.attend(self.given(x, key_mask, cache, document_ids))
        return self.out(out.transpose(1, 2).flatten(2))

    def given(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        cache: LayerCache | StaticLayerCache | None = None,
        document_ids: Tensor | None = None,
    ) -> Given:
        """Queries of the new tokens, keys and values of all."""
        past = 0 if cache is None else cache.length
        self._check(x)
        check_masks(x, key_mask, past, document_ids)
        if document_ids is not None and cache is not None:
            raise ValueError("document_ids are for packed training rows and don't go with a cache")
        query, key, value = self.heads(x)
        if self.rotary:
            place = places(x, key_mask, past) if cache is None else cache.places(x, key_mask)
            query, key = rotate_by_place((query, key), place, self.rope_theta)
        key_lengths = None
        if cache is not None:
            key, value, key_mask, key_lengths = cache.take(key, value, key_mask)
            if key_lengths is not None and not self.takes_key_lengths:
                raise ValueError(f"{type(self).__name__} can't use a static cache: decode with a growing one")
        return Given(x, query, key, value, key_mask, document_ids, cache, key_lengths=key_lengths)

    def _check(self, x: Tensor) -> None:
        if x.ndim != 3 or x.shape[2] != self.query.in_features:
            raise ValueError(f"x must be [B, T, {self.query.in_features}], got {tuple(x.shape)}")

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, H, T, D]`, keys and values `[B, Hkv, T, D]`, before position."""
        query, key, value = self.projected(x)
        if self.qk_norm:  # before heads move to the front: a compiler reads and writes them once, where they lie
            query, key = (F.rms_norm(y, (self.head_width,), eps=NORM_EPS).to(value.dtype) for y in (query, key))
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as projected, `[B, T, heads, D]`."""
        layers = (self.query, self.key, self.value)
        if one_product_is_best(x) and all(is_plain(layer) for layer in layers):
            joint = F.linear(x, torch.cat([layer.weight for layer in layers]))
            query, key, value = joint.split([layer.out_features for layer in layers], dim=-1)
        else:
            query, key, value = (layer(x) for layer in layers)
        query = query.unflatten(-1, (self.n_heads, -1))
        key, value = (y.unflatten(-1, (self.n_kv_heads, -1)) for y in (key, value))
        return query, key, value

    @property
    def dropout_now(self) -> float:
        return self.dropout if self.training else 0.0

    def attend(self, given: Given) -> Tensor:
        """`[B, H, Tq, D]`: what the queries read."""
        raise NotImplementedError

    def logits(self, given: Given, rows: Tensor) -> Tensor:
        """`[B, H, rows, Tk]`: what is normalised over keys, for queries `rows` `[R]`; -inf where none is to be seen."""
        return scores(given, rows).masked_fill(~seen(given, rows), -torch.inf)

    def weigh(self, logits: Tensor) -> Tensor:
        """Logits to weights."""
        return logits.softmax(-1)

    @torch.no_grad()
    def attention_map(self, x: Tensor, key_mask: Tensor | None = None, rows: Tensor | None = None) -> WeightMap:
        """Weights, content scores and logits of queries `rows` `[R]`, all by default, over an input `[B, T, d_model]`.

        Computed without autocast. Memory is `B · H · rows · T`, so ask for few rows of a long input.
        """
        with torch.autocast(x.device.type, enabled=False):
            given = self.given(x, key_mask)
            rows = torch.arange(x.shape[1], device=x.device) if rows is None else rows
            query, key, _ = self.heads(x)
            logits = self.logits(given, rows)
            return WeightMap(self.weigh(logits), self.content(given._replace(query=query, key=key), rows), logits)

    def content(self, given: Given, rows: Tensor) -> Tensor:
        """`[B, H, rows, Tk]`: scores of queries and keys that don't know their place."""
        return scores(given, rows)


def one_product_is_best(x: Tensor) -> bool:
    """In compiled training on a GPU, where it takes 1 to 3 % less of a step, and some memory."""
    return x.is_cuda and torch.is_grad_enabled() and torch.compiler.is_compiling()


def is_plain(layer: nn.Module) -> bool:
    """Whether to call a projection is to multiply by its weight: no subclass, adapter, hook, or odd kind of weight."""
    if type(layer) is not ForgetGate and (type(layer) is not nn.Linear or layer.bias is not None):
        return False
    of_all = modules._global_forward_hooks, modules._global_forward_pre_hooks
    of_all_backward = modules._global_backward_hooks, modules._global_backward_pre_hooks
    its_own = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if any((*of_all, *of_all_backward, *its_own)) or "forward" in vars(layer):
        return False
    return all(type(weight) in (nn.Parameter, Tensor) for weight in (layer.weight, layer.bias) if weight is not None)


def check_masks(x: Tensor, key_mask: Tensor | None, past: int, document_ids: Tensor | None) -> None:
    """Whether masks fit x `[B, T, d_model]`, which follows `past` cached tokens."""
    expected = (x.shape[0], past + x.shape[1])
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != expected):
        raise ValueError(
            f"key_mask must be bool of shape {expected} (cached and new tokens), "
            f"got {key_mask.dtype} {tuple(key_mask.shape)}"
        )
    if document_ids is not None:
        if document_ids.shape != x.shape[:2]:
            raise ValueError(f"document_ids must be {tuple(x.shape[:2])}, got {tuple(document_ids.shape)}")
        if key_mask is not None:
            raise ValueError("give either key_mask or document_ids: padding between documents takes its own id")


def key_places(given: Given) -> Tensor:
    """`[B or 1, Tk]`: places of all keys."""
    return places(given.key, given.key_mask, 0, given.document_ids)


def seen(given: Given, rows: Tensor) -> Tensor:
    """`[B or 1, 1, rows, Tk]` bool: the keys that queries `rows` may look at. Padding sees itself: no row is empty."""
    index = torch.arange(given.key.shape[2], device=given.key.device)
    if given.key_lengths is None:
        own = (rows + given.past)[:, None]
    else:  # queries of padding may stand before the first key
        own = (rows + given.key_lengths[:, None] - given.query.shape[2]).clamp(min=0)[..., None]
    visible = (index <= own).expand(1 if own.ndim == 2 else -1, -1, -1)
    if given.key_mask is not None:
        visible = visible & (given.key_mask[:, None] | (index == own))
    if given.document_ids is not None:
        number = document_numbers(given.document_ids)
        visible = visible & (number[:, rows, None] == number[:, None])
    return visible[:, None]


def scores(given: Given, rows: Tensor) -> Tensor:
    """`[B, H, rows, Tk]` scaled products in float32 (float64 for float64), whatever autocast says."""
    dtype = torch.float64 if given.query.dtype == torch.float64 else torch.float32
    with torch.autocast(given.query.device.type, enabled=False):
        query = given.query[:, :, rows].to(dtype)
        key = given.key.to(dtype).repeat_interleave(query.shape[1] // given.key.shape[1], dim=1)
        return query @ key.mT * given.query.shape[-1] ** -0.5  # [B, H, R, D] @ [B, H, D, Tk]


def softmax_attention(given: Given, dropout: float, *, scale: float | None = None) -> Tensor:
    """Causal `scaled_dot_product_attention`, with padding and documents."""
    query, key, value = given.query, given.key, given.value
    grouped = query.shape[1] != key.shape[1]
    n_queries, n_keys = query.shape[2], key.shape[2]
    plainly_causal = given.key_mask is None and given.document_ids is None and given.key_lengths is None
    if plainly_causal and n_queries in (1, n_keys):
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=n_queries > 1, scale=scale, enable_gqa=grouped
        )
    mask = seen(given, torch.arange(n_queries, device=query.device))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
