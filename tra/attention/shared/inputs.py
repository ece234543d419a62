"""The inputs of a mechanism's attention, and functions of them: visible keys, scores, softmax attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention.shared.pages import Pages, PagesByHead
from tra.attention.shared.positions import document_numbers, positions


class AttentionInputs(NamedTuple):
    """Projected tokens with their masks. Queries stand at the end of the keys."""

    x: Tensor  # [B, Tq, d_model]
    query: Tensor  # [B, H, Tq, D], normalised and rotated if the mechanism does so
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, D]
    key_mask: Tensor | None  # [B, Tk]
    document_ids: Tensor | None  # [B, Tq]
    cache: Any  # a LayerCache, or an object with its methods, or None
    precomputed: Tensor | None = None  # what a mechanism computes once for all row blocks
    key_lengths: Tensor | None = None  # [B]: keys in use of a static cache, for mechanisms that `takes_key_lengths`
    pages: Pages | PagesByHead | None = None  # all keys and values; `key` and `value` are then only the new ones

    @property
    def past(self) -> int:
        """Number of keys before the first query's own."""
        assert self.key_lengths is None
        assert self.pages is None
        return self.key.shape[2] - self.query.shape[2]


def check_masks(x: Tensor, key_mask: Tensor | None, past: int, document_ids: Tensor | None) -> None:
    """Raise a ValueError if masks don't fit x `[B, T, d_model]`, which follows `past` cached tokens."""
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


def key_positions(inputs: AttentionInputs) -> Tensor:
    """Return the positions of all keys, `[B or 1, Tk]`."""
    return positions(inputs.key, inputs.key_mask, 0, inputs.document_ids)


def visible_keys(inputs: AttentionInputs, rows: Tensor) -> Tensor:
    """Return the keys that queries `rows` `[R]` may see, `[B or 1, 1, R, Tk]` bool.

    Padding sees itself, so that no row is empty.
    """
    index = torch.arange(inputs.key.shape[2], device=inputs.key.device)
    if inputs.key_lengths is None:
        own = (rows + inputs.past)[:, None]
    else:  # queries of padding may stand before the first key
        own = (rows + inputs.key_lengths[:, None] - inputs.query.shape[2]).clamp(min=0)[..., None]
    visible = (index <= own).expand(1 if own.ndim == 2 else -1, -1, -1)
    if inputs.key_mask is not None:
        visible = visible & (inputs.key_mask[:, None] | (index == own))
    if inputs.document_ids is not None:
        number = document_numbers(inputs.document_ids)
        visible = visible & (number[:, rows, None] == number[:, None])
    return visible[:, None]


def scores(inputs: AttentionInputs, rows: Tensor) -> Tensor:
    """Return scaled products of queries `rows` with all keys, `[B, H, R, Tk]`.

    In float32 (float64 for float64), also under autocast.
    """
    dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
    with torch.autocast(inputs.query.device.type, enabled=False):
        query = inputs.query[:, :, rows].to(dtype)
        key = inputs.key.to(dtype).repeat_interleave(query.shape[1] // inputs.key.shape[1], dim=1)
        return query @ key.mT * inputs.query.shape[-1] ** -0.5  # [B, H, R, D] @ [B, H, D, Tk]


def softmax_attention(inputs: AttentionInputs, dropout: float, *, scale: float | None = None) -> Tensor:
    """Run causal `scaled_dot_product_attention`, with padding and documents."""
    query, key, value = inputs.query, inputs.key, inputs.value
    grouped = bool(query.shape[1] != key.shape[1])  # in exports sizes, and what compares them, are symbols
    n_queries, n_keys = query.shape[2], key.shape[2]
    unmasked = inputs.key_mask is None and inputs.document_ids is None and inputs.key_lengths is None
    if unmasked and n_queries in (1, n_keys):
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=bool(n_queries > 1), scale=scale, enable_gqa=grouped
        )
    mask = visible_keys(inputs, torch.arange(n_queries, device=query.device))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
