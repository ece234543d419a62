"""Decoding in plain PyTorch: as the definition, and no more read than can matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tra
from tests.ops.compare import Inputs, exact_inputs, padding
from tra.ops import choice, newest_first
from tra.ops.full_map import AttentionMap


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest_first, "FIRST_MAP_KEYS", 16)
    monkeypatch.setattr(newest_first, "MAP_GROWTH", 2)
    monkeypatch.setattr(choice, "MAX_REFERENCE_KEYS", 16)


@pytest.fixture
def lengths_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keys of the maps that were made."""
    found: list[int] = []
    original = newest_first.full_attention_map

    def watched(query: Tensor, key: Tensor, *args: object, **options: object) -> AttentionMap:
        found.append(key.shape[2])
        return original(query, key, *args, **options)

    monkeypatch.setattr(newest_first, "full_attention_map", watched)
    return found


def attend(inputs: Inputs, impl: str = "auto", **options: object) -> Tensor:
    with torch.no_grad():
        return tra.threshold_relative_attention(*inputs, impl=impl, score_bound=8.0, scale=0.0625, **options)


@pytest.mark.parametrize("gate", [None, 0.0, -1e-4, -0.05, -3.0, -300.0])
@pytest.mark.parametrize("n_queries", [1, 3, 16])
def test_like_the_definition(n_queries: int, gate: float | None, lengths_read: list[int]) -> None:
    """In float64 what is left out is below rounding."""
    inputs = exact_inputs(n_queries, heads=4, kv_heads=2, n_queries=n_queries, n_keys=200, dtype=torch.float64)
    if gate is not None:
        inputs = inputs._replace(log_forget=torch.full_like(inputs.log_forget, gate))
    torch.testing.assert_close(attend(inputs), attend(inputs, "reference"), rtol=1e-12, atol=1e-12)
    assert lengths_read[0] == 16
    assert lengths_read[-1] == 200 if gate in (0.0, -1e-4) else lengths_read[-1] < 200 or gate in (None, -0.05)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_and_lengths(side: str) -> None:
    inputs = exact_inputs(1, batch=3, n_queries=2, n_keys=150, dtype=torch.float64)
    options = {"key_mask": padding(side, 3, 150), "key_lengths": torch.tensor([150, 70, 1], dtype=torch.int32)}
    torch.testing.assert_close(
        attend(inputs, **options), attend(inputs, "reference", **options), rtol=1e-12, atol=1e-12
    )


def test_what_is_forgotten_or_free_is_not_read(lengths_read: list[int]) -> None:
    """In a cache of which 100 of 400 slots are used, the newest."""
    query, key, value, gate = exact_inputs(5, batch=2, n_queries=1, n_keys=400, dtype=torch.float64)
    key, value = (x.detach().clone() for x in (key, value))
    for x in (key, value):
        x[:, :, 100:] = torch.nan
        x[:, :, :60] = torch.nan
    inputs = Inputs(query, key, value, torch.full_like(gate, -5.0))
    out = attend(inputs, key_lengths=torch.tensor([100, 98], dtype=torch.int32))
    assert torch.isfinite(out).all()
    assert max(lengths_read) <= 32


def test_a_row_that_keeps_nothing_looks_at_everything(lengths_read: list[int]) -> None:
    inputs = exact_inputs(2, n_queries=1, n_keys=100, dtype=torch.float64)
    out = attend(inputs._replace(query=torch.zeros_like(inputs.query)))
    assert not out.any()
    assert lengths_read[-1] == 100


def test_a_nan_shows() -> None:
    inputs = exact_inputs(2, n_queries=1, n_keys=100)
    query = inputs.query.detach().clone()
    query[0, 0] = torch.nan
    assert attend(inputs._replace(query=query))[0, 0].isnan().all()


def test_which_calls_come_here(lengths_read: list[int]) -> None:
    """Not where gradients are wanted, nor without a promise, nor with a tolerance of 0, nor for a prompt."""
    inputs = exact_inputs(2, n_queries=1, n_keys=100)
    tra.threshold_relative_attention(*inputs, score_bound=8.0).sum().backward()
    attend(inputs, tolerance=0.0)
    with torch.no_grad():
        tra.threshold_relative_attention(*inputs)
        tra.threshold_relative_attention(*inputs, score_bound=8.0, dropout=0.1)
    many = exact_inputs(2, n_queries=choice.MAX_NEWEST_FIRST_QUERIES + 1, n_keys=100)
    attend(many)
    assert not lengths_read
    attend(inputs)
    assert lengths_read


def test_a_named_walk_is_blockwise(lengths_read: list[int]) -> None:
    """Also where "auto" would take this form."""
    inputs = exact_inputs(2, n_queries=1, n_keys=100, dtype=torch.float64)
    named = attend(inputs, "blockwise")
    assert not lengths_read
    torch.testing.assert_close(named, attend(inputs, "reference"), rtol=1e-12, atol=1e-12)
