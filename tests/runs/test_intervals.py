"""The test of two groups of seeds, by hand and against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tra.runs import permutation_p


def test_by_hand() -> None:
    assert permutation_p([1, 1, 1, 1], [0, 0, 0, 0]) == 2 / 70
    assert permutation_p([1, 1, 1], [0, 0, 0]) == 2 / 20
    assert permutation_p([0.5], [0.5, 0.5]) == 1
    assert permutation_p([3], [1, 2]) == 2 / 3  # 3 alone differs by 1.5, as 1 alone does; 2 alone by 0


def test_rounding_of_sums_changes_nothing() -> None:
    values = [0.1, 0.2, 0.3, 0.7, 1e-17]
    assert permutation_p(values[:2], values[2:]) == permutation_p(values[2:], values[:2])


@pytest.mark.parametrize(("one", "other"), [(4, 4), (3, 5), (2, 6)])
def test_against_scipy(one: int, other: int) -> None:
    random = np.random.default_rng(one)
    values = random.normal(size=one + other)
    values[:one] += 1

    def difference(a: np.ndarray, b: np.ndarray) -> float:
        return abs(a.mean() - b.mean())

    expected = stats.permutation_test(
        (values[:one], values[one:]), difference, alternative="greater", n_resamples=np.inf
    )
    assert permutation_p(values[:one].tolist(), values[one:].tolist()) == pytest.approx(expected.pvalue)


def test_empty_groups() -> None:
    with pytest.raises(ValueError, match="at least one value in each"):
        permutation_p([], [1.0])
