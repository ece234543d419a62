"""The definition itself: the paper's worked case, gradients, and the map."""

from __future__ import annotations

import pytest
import torch

import tra
from tests.ops.compare import exact_inputs
from tra.ops import attention_map


def worked_case(impl: str) -> torch.Tensor:
    """d = 1, no norm, S = (2, -1, 0, 3) and δ = -1 for the last row; values are unit vectors, so A comes out."""
    query, key = torch.ones(1, 1, 4, 1), torch.tensor([2.0, -1.0, 0.0, 3.0]).view(1, 1, 4, 1)
    value, log_forget = torch.eye(4).view(1, 1, 4, 4), torch.full((1, 1, 4), -1.0)
    return tra.threshold_relative_attention(query, key, value, log_forget, scale=1.0, impl=impl)[0, 0, 3]


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_worked_case_of_the_paper(impl: str) -> None:
    assert [round(x, 4) for x in worked_case(impl).tolist()] == [0.1192, 0.0, 0.0, 0.8808]


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_float64_gradcheck(impl: str) -> None:
    # Scores are exact multiples of 1/32; a probe of 1e-6 cannot carry one across this threshold.
    inputs = exact_inputs(3, heads=4, kv_heads=2, n_queries=5, n_keys=7, width=4, value_width=3, dtype=torch.float64)

    def attend(*args: torch.Tensor) -> torch.Tensor:
        return tra.threshold_relative_attention(*args, threshold=1 / 64, impl=impl, tolerance=0.0)

    assert torch.autograd.gradcheck(attend, tuple(inputs))


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_float64_gradcheck_with_dropout(impl: str) -> None:
    inputs = exact_inputs(4, batch=1, n_queries=6, width=4, dtype=torch.float64)

    def attend(*args: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return tra.threshold_relative_attention(*args, threshold=1 / 64, dropout=0.3, impl=impl)

    assert torch.autograd.gradcheck(attend, tuple(inputs))


def test_map_agrees_with_the_operator_and_with_counting_by_hand() -> None:
    query, key, value, log_forget = exact_inputs(5, n_queries=37, n_keys=50, dtype=torch.float64)
    weights, kept, distances, scores, counted = attention_map(query, key, log_forget, rows_at_once=8)
    out = tra.threshold_relative_attention(query, key, value, log_forget, impl="reference")
    torch.testing.assert_close(weights @ value, out)
    assert torch.equal(kept, counted)
    for i in range(37):
        count = 0
        for j in range(i + 13, -1, -1):
            is_kept = bool(scores[0, 0, i, j] > 0)
            count += is_kept
            assert bool(kept[0, 0, i, j]) == is_kept
            assert int(distances[0, 0, i, j]) == (count if is_kept else 0)
        assert not kept[0, 0, i, i + 14 :].any()


def test_map_of_a_window_is_a_window_of_the_map() -> None:
    query, key, _, log_forget = exact_inputs(6, n_queries=40)
    whole = attention_map(query, key, log_forget)
    window = attention_map(query, key, log_forget, queries=slice(10, 30), keys=slice(5, 25), rows_at_once=7)
    for part, of in zip(window, whole, strict=True):
        assert torch.equal(part, of[:, :, 10:30, 5:25])
    with pytest.raises(ValueError, match="non-empty slice"):
        attention_map(query, key, log_forget, queries=slice(50, 60))


def test_dropout_keeps_the_mean_and_obeys_the_seed() -> None:
    inputs = exact_inputs(7, n_queries=32, dtype=torch.float64)
    plain = tra.threshold_relative_attention(*inputs, impl="reference")
    torch.manual_seed(1)
    samples = torch.stack(
        [tra.threshold_relative_attention(*inputs, dropout=0.25, impl="reference") for _ in range(2000)]
    )
    standard_error = samples.std(0) / 2000**0.5
    assert float(((samples.mean(0) - plain).abs() <= 5 * standard_error + 1e-12).double().mean()) == 1.0
    torch.manual_seed(1)
    assert torch.equal(tra.threshold_relative_attention(*inputs, dropout=0.25, impl="reference"), samples[0])
    assert not torch.equal(samples[0], samples[1])
