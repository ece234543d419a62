"""The options of one call of the operator, checked and with their defaults filled in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def default_tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative weight that rounding of the sums hides anyway."""
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


@dataclass(frozen=True)
class AttentionOptions:
    """Numbers that say what is computed, see `tra.threshold_relative_attention`.

    Internal functions take them as one value. Only operators of `torch.library` need them one by one.
    """

    scale: float
    threshold: float = 0.0
    score_bound: float | None = None
    dropout: float = 0.0
    tolerance: float = 0.0
    margin: float = 0.0

    @property
    def lower_cut(self) -> float:
        """The score at or below which a key leaves the softmax: threshold - margin; -inf at an infinite margin."""
        return -math.inf if self.margin == math.inf else self.threshold - self.margin

    @property
    def has_margin(self) -> bool:
        """Whether a key may stay without counting."""
        return self.lower_cut < self.threshold

    def __post_init__(self) -> None:
        # Comparisons, not math.isfinite: a compiler may pass symbolic floats.
        if not -math.inf < self.scale < math.inf:
            raise ValueError(f"scale must be finite, got {self.scale}")
        if self.threshold != self.threshold:
            raise ValueError("threshold must be a number, got nan")
        if not self.margin >= 0:
            raise ValueError(f"margin must be at least 0, got {self.margin}")
        if self.score_bound is not None and not 0 <= self.score_bound < math.inf:
            raise ValueError(f"score_bound must be finite and at least 0, got {self.score_bound}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must lie in [0, 1), got {self.tolerance}")

    @classmethod
    def resolve(
        cls,
        width: int,
        dtype: torch.dtype,
        scale: float | None = None,
        threshold: float = 0.0,
        score_bound: float | None = None,
        dropout: float = 0.0,
        tolerance: float | None = None,
        margin: float = 0.0,
    ) -> AttentionOptions:
        """Fill in the defaults of heads of a width, in a dtype."""
        scale = width**-0.5 if scale is None else scale
        tolerance = default_tolerance(dtype) if tolerance is None else tolerance
        return cls(scale, threshold, score_bound, dropout, tolerance, margin)
