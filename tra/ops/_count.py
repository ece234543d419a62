"""Counting kept keys from right to left."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_IN_HALF = 2048
"""Up to here float16 holds every whole number."""


def count_from_the_right(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Of `[..., n]` bool: how many are True from each place up to the end of its row, in `dtype`.

    On a GPU a product with a triangle of ones, which is exact, and which a compiler doesn't fuse with what reads the
    counts: see `tra.ops._softmax` for how that goes wrong.
    """
    if not kept.is_cuda:
        return kept.to(dtype).flip(-1).cumsum(-1).flip(-1)
    length = kept.shape[-1]
    whole = torch.float16 if length <= EXACT_IN_HALF else torch.float32
    triangle = torch.ones(length, length, dtype=whole, device=kept.device).tril()
    return (kept.to(whole) @ triangle).to(dtype)
