"""95 % intervals of a proportion and of means over documents, and a test of two means over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
"""Draws of documents behind a bootstrap interval."""


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson 1927), which stays within 0 and 1."""
    if trials < 1:
        raise ValueError("an interval needs at least one trial")
    rate = successes / trials
    middle = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    low = 0.0 if successes == 0 else (middle - spread) / scale
    high = 1.0 if successes == trials else (middle + spread) / scale
    return low, high


def bootstrap_interval(sums: npt.NDArray[np.float64], counts: npt.NDArray[Any]) -> tuple[float, float]:
    """Return the 95 % interval of the mean a token, `sums.sum() / counts.sum()`, with documents resampled.

    Equally many documents are always resampled alike, so intervals of two models on one text can be compared.

    Args:
        sums: [N], of each document.
        counts: [N], tokens of each document.
    """
    random = np.random.default_rng(0)
    draws = (random.integers(len(sums), size=len(sums)) for _ in range(RESAMPLES))
    means = [sums[drawn].sum() / counts[drawn].sum() for drawn in draws]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def perplexity_ratio(documents: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Return one perplexity over another with its 95 % interval, paired by document.

    Args:
        documents: [N, 2], loss in nats and tokens of each document.
        others: The same documents, under the model or window to compare with.
    """
    differences, counts = documents[:, 0] - others[:, 0], documents[:, 1]
    low, high = bootstrap_interval(differences, counts)
    return math.exp(differences.sum() / counts.sum()), math.exp(low), math.exp(high)


def permutation_p(one: Sequence[float], other: Sequence[float]) -> float:
    """Return p of an exact two-sided permutation test: that the means of two groups of seeds differ by chance alone.

    It is the share of all ways to divide the values into groups of these sizes whose means differ at least as much
    (Fisher 1935). With 4 seeds each it can't be below 2 / 70 = 0.029, with 3 each not below 0.1.
    """
    if not one or not other:
        raise ValueError("a test of two groups needs at least one value in each")
    values = [*one, *other]
    total, size = math.fsum(values), len(one)

    def difference(chosen: Sequence[float]) -> float:
        first = math.fsum(chosen)
        return abs(first / size - (total - first) / len(other))

    least = difference(one) * (1 - 1e-12)  # sums in another order may round differently
    divisions = [difference(chosen) >= least for chosen in combinations(values, size)]
    return sum(divisions) / len(divisions)
