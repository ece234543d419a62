"""What all mechanisms share: projections, the norm of queries and keys, the cache, and the masks of SDPA."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tra.attention._cache import LayerCache


class Attention(nn.Module):
    """Causal self-attention with everything but the mechanism.

    A mechanism overrides `attend`, and `place` if it marks positions on queries and keys.

    Args:
        d_model: Width of the input and the output.
        n_heads: Query heads; their width is `d_model / n_heads`.
        n_kv_heads: Key and value heads, each shared by `n_heads / n_kv_heads` query heads; n_heads by default.
        qk_norm: RMS-normalise queries and keys, without a learned scale; None is the mechanism's published choice.
        dropout: Rate on the attention weights, in training.
    """

    default_qk_norm: ClassVar[bool] = False
    config_fields: ClassVar[tuple[str, ...]] = ()
    """Arguments of the mechanism's own, which `DecoderConfig` holds under the same names."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        qk_norm: bool | None = None,
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
        self.dropout = dropout
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, n_kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(d_model, n_kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(d_model, d_model)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        cache: LayerCache | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """`[B, T, d_model]` -> the same.

        Args:
            key_mask: `[B, cached + T]` bool, False at padding, which may stand anywhere.
            cache: Holds the keys and values of earlier tokens, and takes those of the new ones.
            document_ids: `[B, T]`: tokens see only their own document, which ends where the id changes.
        """
        query, key, value = self.project(x, key_mask, cache, document_ids)
        out = self.attend(x, query, key, value, key_mask, document_ids)
        return self.out(out.transpose(1, 2).flatten(2))

    def project(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        cache: LayerCache | None = None,
        document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, H, T, D]`, and keys and values `[B, Hkv, cached + T, D]`."""
        past = 0 if cache is None else cache.length
        self._check(x, key_mask, past, document_ids)
        if document_ids is not None and cache is not None:
            raise ValueError("document_ids are for packed training rows and don't go with a cache")
        query = self.query(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2)
        value = self.value(x).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2)
        if self.qk_norm:
            query, key = (F.rms_norm(y, (self.head_width,), eps=1e-6).to(value.dtype) for y in (query, key))
        query, key = self.place(query, key, key_mask, past)
        if cache is not None:
            key, value = cache.append(key, value)
        return query, key, value

    def place(self, query: Tensor, key: Tensor, key_mask: Tensor | None, past: int) -> tuple[Tensor, Tensor]:
        """Mark positions on new queries and keys. Most mechanisms don't."""
        return query, key

    def attend(
        self,
        x: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> Tensor:
        """`[B, H, Tq, D]`: what the queries, which stand at the end of the keys, read."""
        raise NotImplementedError

    def _check(self, x: Tensor, key_mask: Tensor | None, past: int, document_ids: Tensor | None) -> None:
        if x.ndim != 3 or x.shape[2] != self.query.in_features:
            raise ValueError(f"x must be [B, T, {self.query.in_features}], got {tuple(x.shape)}")
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


def positions(x: Tensor, key_mask: Tensor | None, past: int) -> Tensor:
    """`[B or 1, T]`: places of the new tokens among real tokens; padding doesn't count."""
    length = x.shape[-2]
    if key_mask is None:
        return torch.arange(past, past + length, device=x.device)[None]
    return (key_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]


def document_numbers(document_ids: Tensor) -> Tensor:
    """`[B, T]`: 0, 1, 2, … along each row, rising wherever the id changes."""
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    return F.pad(changes.long().cumsum(-1), (1, 0))


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
    dropout: float,
) -> Tensor:
    """Causal `scaled_dot_product_attention`, queries at the end of the keys, with padding and documents."""
    grouped = query.shape[1] != key.shape[1]
    n_queries, n_keys = query.shape[2], key.shape[2]
    if key_mask is None and document_ids is None and n_queries in (1, n_keys):
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=n_queries > 1, enable_gqa=grouped
        )
    index = torch.arange(n_keys, device=query.device)
    own = index[n_keys - n_queries :, None]
    seen = (index <= own)[None]
    if key_mask is not None:  # a query on padding sees itself, so that no row is empty
        seen = seen & (key_mask[:, None] | (index == own))
    if document_ids is not None:
        number = document_numbers(document_ids)
        seen = seen & (number[:, :, None] == number[:, None])
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen[:, None], dropout_p=dropout, enable_gqa=grouped
    )
