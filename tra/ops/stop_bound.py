"""An upper bound on the weight of keys that haven't been read; `README.md` derives it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def log_remaining_weight(
    log_forget: Tensor,
    count: Tensor,
    keys_left: Tensor,
    largest_score: Tensor,
    margin_threshold: float | None = None,
) -> Tensor:
    """Return the logarithm of the largest weight of `keys_left` further keys, all with distances above `count`.

    Args:
        margin_threshold: With a margin, the threshold, which bounds scores of keys that stay without counting.
    """
    terms = torch.where(log_forget == 0, keys_left, torch.expm1(log_forget * keys_left) / torch.expm1(log_forget))
    if margin_threshold is not None:
        terms = terms + keys_left * (margin_threshold - largest_score).clamp(max=0).exp()
    decay = log_forget * (count + 1)
    rounding = 16 * torch.finfo(log_forget.dtype).eps * (1 + largest_score.abs() + decay.abs())
    return largest_score + decay + terms.log() + rounding


class OlderKeys(NamedTuple):
    """Older keys of a row that this call doesn't have, because another call reads them."""

    number: int  # at least as many as there are
    largest: Tensor  # [N]: largest of `key_bounds`, over these keys and those of the call


class RemainingScores:
    """A bound on the scores that a row can have left of a key block. It is NaN, which stops no walk, if a NaN is there.

    Args:
        keys: `[N, T, D]`, T whole blocks of `block` keys.
        values: `[N, T, Dv]`.
        older: Further keys of the rows, left of these.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        block: int,
        dtype: torch.dtype,
        scale: float,
        score_bound: float | None,
        older: OlderKeys | None = None,
    ) -> None:
        self.factor = score_factor(keys.shape[2], dtype, keys.device, scale)
        self.promised = score_bound is not None
        by_block = key_bounds(keys, values, score_bound).view(keys.shape[0], -1, block).amax(-1)
        self.largest = by_block.cummax(-1).values  # [N, blocks]: of blocks 0..index
        if older is not None:
            self.largest = torch.maximum(self.largest, older.largest[:, None])

    def left_of(self, index: int, query_norm: Tensor, heads: Tensor | slice) -> Tensor:
        """Return the bound for the rows of some heads, with norms `[n, R]`, on keys in blocks 0..index-1."""
        largest = self.largest[heads, index - 1][:, None]
        return largest.expand_as(query_norm) if self.promised else query_norm * largest * self.factor


def key_bounds(keys: Tensor, values: Tensor, score_bound: float | None) -> Tensor:
    """Return a bound on the scores with each key, `[N, T, D]` -> `[N, T]`: its norm, or the promised bound.

    It is NaN where a key or its value has a NaN.
    """
    if score_bound is None:
        bounds = euclidean_norms(keys)
    else:
        bounds = torch.full(keys.shape[:2], score_bound, dtype=torch.float64, device=keys.device)
    return bounds.masked_fill(keys.isnan().any(-1) | values.isnan().any(-1), torch.nan)


def score_factor(width: int, dtype: torch.dtype, device: torch.device, scale: float) -> float:
    """Return the largest ratio of a computed score to the product of the norms: the scale, and D roundings."""
    return abs(scale) * (1 + (width + 2) * _product_epsilon(dtype, device))


def euclidean_norms(x: Tensor) -> Tensor:
    """Return norms in float64, as squares of small float32 numbers are 0."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)


def _product_epsilon(dtype: torch.dtype, device: torch.device) -> float:
    """Return the rounding of matrix products, which round float32 to TF32 where PyTorch is told so."""
    tf32 = dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return 2.0**-10 if tf32 else torch.finfo(dtype).eps
