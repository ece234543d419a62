"""Documents packed into one row, which `position_ids` tell apart: they start again at 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.ops.compiler_workarounds import is_exporting

PADDING_POSITION = -2
"""Stands for the position of padding: neither it nor the next token follows the one before, so each is a start."""


def document_ids(position_ids: Tensor | None, key_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Return ids of documents `[batch, length]`, or None if every row is one document.

    Args:
        position_ids: `[batch or 1, length]`, counting 0, 1, 2, … in each document.
        key_mask: `[batch, length]` bool, False at padding, which becomes documents of one token.
    """
    if position_ids is None or (key_mask is not None and is_exporting()):
        return None  # a graph for any row, which reads whole maps anyway, stays that of padded rows
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise ValueError(f"position_ids must be [{batch} or 1, {length}], got {tuple(position_ids.shape)}")
    position, real = position_ids.expand(batch, -1), torch.ones_like(position_ids, dtype=torch.bool)
    if key_mask is not None:
        position, real = position.masked_fill(~key_mask, PADDING_POSITION), key_mask
    starts = F.pad(position.diff(dim=1) != 1, (1, 0), value=True)
    if not torch.compiler.is_compiling():  # a graph can't read values
        if bool(((position != 0) & starts & real).any()):
            raise ValueError("position_ids must count 0, 1, 2, ... in each document: positions are counted here")
        if bool(((starts & real).sum(1) <= 1).all()):
            return None
    return starts.cumsum(-1)


def check_not_packed(position_ids: Tensor | None, attention_mask: Tensor | None) -> None:
    """Raise a ValueError if new tokens for a cache are several documents."""
    if position_ids is None or attention_mask is not None or torch.compiler.is_compiling():
        return
    if position_ids.shape[-1] > 1 and bool((position_ids.diff(dim=-1) != 1).any()):
        raise ValueError("documents packed by position_ids don't go with a cache: use_cache=False")
