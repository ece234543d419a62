"""The early stop leaves out no more than it promises, and stops at all."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tra
from tests.ops import compare
from tests.slow import slow
from tra.ops import attention_map

LENGTH = 1100
GATES = (-20.0, -3.0, -0.69, -0.13, -0.018, -1e-3, -1e-6, 0.0)


def gates(kind: str, seed: int) -> Tensor:
    """`[1, 2, T]` log forget gates of one kind."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "initialisation":
        return F.logsigmoid(torch.randn(1, 2, LENGTH, generator=generator))
    if kind == "log-uniform":
        return -(10 ** (torch.rand(1, 2, LENGTH, generator=generator) * 7.3 - 6))
    return torch.full((1, 2, LENGTH), float(kind))


def contents(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Queries and keys `[1, 2, T, 16]` whose scores are exact."""
    return compare.contents(kind, seed, LENGTH)


def dropped_weight(query: Tensor, key: Tensor, log_forget: Tensor, tolerance: float | None, **options: float) -> Tensor:
    """`[1, 2, T]`: the weight, by the float64 definition, of the keys the walk didn't read.

    Values are unit vectors, one per key, so the output is the weights and an unread key shows as exactly 0.
    """
    value = torch.eye(LENGTH).expand(1, 2, LENGTH, LENGTH)
    got = tra.threshold_relative_attention(
        query,
        key,
        value,
        log_forget,
        tolerance=tolerance,
        impl="blockwise",
        **options,
    )
    exact = attention_map(query.double(), key.double(), log_forget.double()).weights
    # Weights that underflow in float32 are 0 whether read or not: they can't be told apart, and don't matter.
    return torch.where(got == 0, exact, 0.0).sum(-1)


@pytest.mark.parametrize("content", ["dense", "sparse", "null rows", "far and strong"])
@pytest.mark.parametrize("gate", ["log-uniform", *slow("initialisation", *map(str, GATES))])
@pytest.mark.parametrize("tolerance", [None, *slow(1e-3)])
def test_dropped_weight_is_within_tolerance(content: str, gate: str, tolerance: float | None) -> None:
    query, key = contents(content, 1)
    log_forget = gates(gate, 2)
    for options in ({}, {"score_bound": float((query.double() @ key.double().mT).abs().max()) / 4}):
        dropped = dropped_weight(query, key, log_forget, tolerance, **options)
        assert float(dropped.max()) <= (2.0**-24 if tolerance is None else tolerance)


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**20),
    content=st.sampled_from(["dense", "sparse", "null rows", "far and strong"]),
    exponent=st.floats(-6, math.log10(20)),
    tolerance=st.sampled_from([2.0**-24, 1e-5, 1e-2, 0.3]),
)
def test_dropped_weight_over_random_gates(seed: int, content: str, exponent: float, tolerance: float) -> None:
    query, key = contents(content, seed)
    log_forget = torch.full((1, 2, LENGTH), -(10**exponent)) * torch.rand(1, 2, LENGTH).clamp(min=0.5)
    assert float(dropped_weight(query, key, log_forget, tolerance).max()) <= tolerance


@pytest.mark.parametrize("gate", ["initialisation", "-20.0", "0.0"])
def test_tolerance_zero_is_the_full_walk(gate: str) -> None:
    """Bit for bit: a bound that never lets go (an absurd promise) gives the same walk as tolerance 0."""
    query, key = contents("dense", 3)
    value, log_forget = torch.randn(1, 2, LENGTH, 8), gates(gate, 4)
    leaves = tuple(x.clone().requires_grad_() for x in (query, key, value, log_forget))
    results = []
    for options in ({"tolerance": 0.0}, {"tolerance": 2.0**-24, "score_bound": 1e30}):
        out = tra.threshold_relative_attention(*leaves, impl="blockwise", **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def visited(query: Tensor, key: Tensor, log_forget: Tensor, tolerance: float) -> list[list[int]]:
    """The oldest key block visited, per head and query block."""
    last = torch.arange(LENGTH)[None]
    *_, stops = torch.ops.tra.blockwise_forward(
        query, key, key, log_forget, torch.zeros_like(last), last, torch.zeros(1, dtype=torch.int64),
        0.25, 0.0, 0.0, None, 0.0, tolerance,
    )  # fmt: skip
    return stops.tolist()


def test_a_forgetful_head_stops_and_a_remembering_one_does_not() -> None:
    query, key = contents("dense", 5)
    log_forget = torch.full((1, 2, LENGTH), -2.0)
    log_forget[:, 1] = 0.0
    forgetful, remembering = visited(query, key, log_forget, 2.0**-24)
    blocks = len(forgetful)
    assert remembering == [0] * blocks
    assert forgetful[-1] >= blocks - 2
    assert visited(query, key, log_forget, 0.0) == [[0] * blocks] * 2


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("score_bound", [None, 40.0])
def test_a_stop_does_not_hide_a_nan(which: str, score_bound: float | None) -> None:
    query, key = contents("dense", 5)
    value = torch.randn(1, 2, LENGTH, 8)
    {"key": key, "value": value}[which][0, 0, 3] = torch.nan
    out = tra.threshold_relative_attention(
        query, key, value, torch.full((1, 2, LENGTH), -2.0), score_bound=score_bound, impl="blockwise"
    )
    assert out[0, 0, 3:].isnan().all()
    assert not out[0, 1].isnan().any()


@pytest.mark.parametrize("small", ["query", "key"])
def test_the_bound_holds_where_squares_underflow(small: str) -> None:
    """Weak keys near and strong ones far, with ordinary scores of 20 and 400 made of 1e-23 and 1e16."""
    weak, strong = torch.full((1, 2, LENGTH, 8), 1e-23), torch.full((1, 2, LENGTH, 8), 1e16)
    query, key = (weak, strong) if small == "query" else (strong, weak)
    key[:, :, : LENGTH // 2] *= 20
    value = torch.zeros(1, 2, LENGTH, 1)
    value[:, :, : LENGTH // 2] = 1.0
    log_forget = torch.full((1, 2, LENGTH), -0.1)
    out = tra.threshold_relative_attention(query, key, value, log_forget, scale=2.5e7, impl="blockwise")
    torch.testing.assert_close(out[..., -1, :], torch.ones(1, 2, 1))


def test_gradients_with_a_stop_are_those_of_the_full_walk() -> None:
    query, key = contents("dense", 6)
    leaves = tuple(x.clone().requires_grad_() for x in (query, key, torch.randn(1, 2, LENGTH, 16), gates("-0.69", 0)))
    results = []
    for tolerance in (None, 0.0):
        out = tra.threshold_relative_attention(*leaves, tolerance=tolerance, impl="blockwise")
        results.append(torch.autograd.grad(out.sum(), leaves))
    assert visited(query, key, leaves[3], 2.0**-24)[0][-1] > 0
    for stopped, full in zip(*results, strict=True):
        torch.testing.assert_close(stopped, full, rtol=1e-5, atol=1e-5)
