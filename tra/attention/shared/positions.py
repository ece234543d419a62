"""Positions of tokens among real ones: padding doesn't count, and packed documents start anew."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def positions(x: Tensor, key_mask: Tensor | None, past: int, document_ids: Tensor | None = None) -> Tensor:
    """Return the positions of the new tokens of x `[..., T, width]` among real tokens, `[B or 1, T]`."""
    length = x.shape[-2]
    index = torch.arange(past, past + length, device=x.device)[None]
    if document_ids is not None:
        number = document_numbers(document_ids)
        first = F.pad(number[:, 1:] != number[:, :-1], (1, 0), value=True)
        return index - torch.where(first, index, 0).cummax(-1).values
    if key_mask is None:
        return index
    return (key_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]


def document_numbers(document_ids: Tensor) -> Tensor:
    """Return 0, 1, 2, … along each row `[B, T]`, rising wherever the id changes."""
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    return F.pad(changes.long().cumsum(-1), (1, 0))
