"""Counting kept keys from right to left."""

from __future__ import annotations

import torch
from torch import Tensor

from tra.ops.running_sums import sum_from_the_right

EXACT_IN_HALF = 2048
"""Up to here float16 holds every whole number."""


def count_from_the_right(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Of `[..., n]` bool: how many are True from each place up to the end of its row, in `dtype`.

    On a GPU, as far as a half holds the counts, a product with a triangle of ones: exact, fast, and nothing that a
    compiler fuses with what reads the counts (see `tra.ops.softmax` for how that goes wrong).
    """
    length = kept.shape[-1]
    if not kept.is_cuda or length > EXACT_IN_HALF:
        return sum_from_the_right(kept.to(dtype))
    triangle = torch.ones(length, length, dtype=torch.float16, device=kept.device).tril()
    return (kept.to(torch.float16) @ triangle).to(dtype)
