"""Windows of an epoch: every token once, in an order that looks random and needs no memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.slow import slow
from tra.tasks import stream_seed
from tra.text.windows import shuffled, training_windows, windows_per_epoch

TOKENS, WINDOW = 10_000, 16


def epoch(number: int, tokens: int = TOKENS, window: int = WINDOW, seed: int = 0) -> np.ndarray:
    each = windows_per_epoch(tokens, window)
    return training_windows(np.arange(number * each, (number + 1) * each), tokens, window, seed)


@given(size=st.one_of(st.integers(1, 70), st.integers(1, 5000)), key=st.integers(0, 2**63 - 1))
def test_a_shuffle_is_one_to_one(size: int, key: int) -> None:
    assert np.array_equal(np.sort(shuffled(np.arange(size), size, key)), np.arange(size))


@given(place=st.integers(0, 2**40 - 2), key=st.integers(0, 2**63 - 1))
def test_a_place_of_a_large_shuffle_needs_no_other(place: int, key: int) -> None:
    size = 2**40 - 1
    found = shuffled(np.array([place, size - 1]), size, key)
    assert (found >= 0).all()
    assert (found < size).all()
    assert shuffled(np.array([place]), size, key)[0] == found[0]


@given(window=st.integers(1, 40), more=st.integers(0, 500), seed=st.integers(0, 1000), number=st.integers(0, 50))
def test_every_token_is_a_target_once_an_epoch(window: int, more: int, seed: int, number: int) -> None:
    """But for less than two windows at the ends; and no window leaves the stream."""
    tokens = 2 * window + more
    starts = epoch(number, tokens, window, seed)
    targets = np.sort((starts[:, None] + np.arange(1, window + 1)).ravel())
    assert np.array_equal(targets, np.arange(targets[0], targets[0] + len(targets)))
    assert starts.min() >= 0
    assert targets[-1] < tokens
    assert tokens - len(targets) < 2 * window


def test_epochs_begin_elsewhere() -> None:
    """Else the same token would be the first of its window in every epoch, and never predicted from many."""
    offsets = [set(epoch(number) % WINDOW) for number in range(20)]
    assert {len(found) for found in offsets} == {1}
    assert len(set.union(*offsets)) > WINDOW / 2


@given(cuts=st.lists(st.integers(0, 2000), max_size=6), seed=st.integers(0, 1000))
def test_rows_do_not_depend_on_how_they_are_drawn(cuts: list[int], seed: int) -> None:
    """A draw may lie in several epochs."""
    rows = np.arange(2000)
    pieces = [training_windows(part, TOKENS, WINDOW, seed) for part in np.split(rows, sorted(cuts))]
    assert np.array_equal(np.concatenate(pieces), training_windows(rows, TOKENS, WINDOW, seed))


def test_order_follows_the_seed_and_the_epoch() -> None:
    orders = {tuple(epoch(number, seed=seed) // WINDOW) for number in range(5) for seed in range(5)}
    assert len(orders) == 25


def five_deviations(samples: int) -> float:
    """Of the correlation of as many unrelated pairs."""
    return 5 / np.sqrt(samples)


@pytest.mark.parametrize("seed", range(5))
def test_order_looks_random(seed: int) -> None:
    first, second = (epoch(number, tokens=160_000, seed=seed) // WINDOW for number in (0, 1))
    bound = five_deviations(len(first))
    assert abs(np.corrcoef(first, np.arange(len(first)))[0, 1]) < bound
    assert abs(np.corrcoef(first, second)[0, 1]) < bound
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < bound
    assert abs(np.corrcoef(first, epoch(0, tokens=160_000, seed=seed + 5) // WINDOW)[0, 1]) < bound


@pytest.mark.parametrize("size", [10, *slow(3, 33)])
def test_every_place_goes_everywhere_equally_often(size: int) -> None:
    """Over keys as runs have them: χ² within five deviations of what chance gives."""
    times = 4000
    drawn = np.stack([shuffled(np.arange(size), size, stream_seed(0, "text/order", i)) for i in range(times)])
    counts = np.stack([np.bincount(drawn[:, place], minlength=size) for place in range(size)])
    chi = ((counts - times / size) ** 2 / (times / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom)
