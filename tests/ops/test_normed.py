"""The norm of queries and keys, with its gradient worked out by the kernels, against float64 and PyTorch's norm.

Entries of a row are plus or minus one number, of odd widths: no score is near 0, so all keep the same keys.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tra
from tests.ops import compare
from tests.ops.compare import Inputs, causal, exact_inputs
from tests.ops.test_fused import DEVICE, DTYPES
from tra.attention import ThresholdRelativeAttention
from tra.attention import tra as layer_file
from tra.attention._base import Given
from tra.ops import fused
from tra.ops.api import attention_of_normalised, takes_norm
from tra.ops.fused import normalised

pytestmark = pytest.mark.filterwarnings(  # of the interpreter
    "ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"
)
EPS = 1e-6


@pytest.fixture(autouse=True)
def stops_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "EARLY_ABOVE", 0)


def rows_of_one_size(seed: int, dtype: torch.dtype, **shape: int) -> Inputs:
    query, key, value, log_forget = exact_inputs(seed, dtype=dtype, **shape)
    draws = torch.Generator().manual_seed(seed)

    def rows(x: Tensor) -> Tensor:
        signs = torch.randint(2, x.shape, generator=draws) * 2 - 1
        return (signs * 2.0 ** torch.randint(-2, 3, (*x.shape[:-1], 1), generator=draws)).to(dtype)

    return Inputs(rows(query), rows(key), value, log_forget).on(DEVICE)


def plainly(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """PyTorch's norm, and the definition in float64 or the form without thought of precision."""
    query, key = (F.rms_norm(x, (x.shape[-1],), eps=EPS).to(dtype) for x in inputs[:2])
    if dtype == torch.float64:
        return tra.threshold_relative_attention(query, key, *inputs[2:], impl="reference")
    seen = causal(query.shape[2], key.shape[2]).to(DEVICE)
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, inputs.value))
    return compare.plain(query, key, value, inputs.log_forget, seen)


def results(out: Tensor, inputs: Inputs) -> list[Tensor]:
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, list(inputs), grad))]


@DTYPES
@pytest.mark.parametrize("score_bound", [None, 4.1], ids=["online", "fixed"])
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ({"n_queries": 100}, False),
        ({"n_queries": 70, "heads": 4, "kv_heads": 2, "width": 25}, False),
        ({"n_queries": 200}, True),
    ],
    ids=["plain", "grouped", "chunks"],
)
def test_gradients_are_those_before_the_norm(
    shape: dict[str, int], chunks: bool, score_bound: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunks:
        monkeypatch.setattr(fused, "_transient_bytes", lambda _: 1)
    inputs = rows_of_one_size(1, dtype, batch=1, **({"width": 15} | shape))
    right, plain = inputs.to(torch.float64), inputs.to(dtype)
    expected = results(plainly(right, torch.float64), right)
    usual = results(plainly(plain, dtype), plain)
    found = results(attention_of_normalised(*inputs, eps=EPS, score_bound=score_bound), inputs)
    for name, got, wanted, other in zip(("out", *Inputs._fields), found, expected, usual, strict=True):
        error, allowed = ((x - wanted).square().mean().sqrt() for x in (got, other))
        assert error <= 2 * allowed, f"{name}: {error} > 2 · {allowed}"


def test_what_is_normalised_is_pytorchs_norm() -> None:
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    hat, factor = normalised(x, EPS)
    torch.testing.assert_close(hat, F.rms_norm(x, (16,), eps=EPS))
    torch.testing.assert_close(x * factor[..., None], hat)
    assert normalised(x.half(), EPS)[0].dtype == torch.float16


def test_the_layer_takes_it_in_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only there; with the gradients that its other way has."""
    torch.manual_seed(0)
    layer = ThresholdRelativeAttention(32, 2, impl="triton").to(DEVICE)
    x = torch.randn(2, 40, 32, device=DEVICE, requires_grad=True)
    calls = []
    original = layer_file.attention_of_normalised

    def count(*inputs: Tensor, **options: float) -> Tensor:
        calls.append(1)
        return original(*inputs, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(layer_file, "attention_of_normalised", count)
    parameters = [x, *layer.parameters()]
    fast = torch.autograd.grad(layer(x).square().sum(), parameters)
    assert len(calls) == 1
    usual = torch.autograd.grad(layer(x, torch.ones(2, 40, dtype=torch.bool, device=DEVICE)).square().sum(), parameters)
    with torch.no_grad():
        layer(x)
    layer.impl = "blockwise"
    layer(x)
    assert len(calls) == 1
    for one, other in zip(fast, usual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_layer_of_ones_own_is_asked() -> None:
    """One that attends otherwise, or to other heads."""

    class Twice(ThresholdRelativeAttention):
        def attend(self, given: Given) -> Tensor:
            return 2 * super().attend(given)

    torch.manual_seed(0)
    layer, twice = (kind(32, 2, impl="triton").to(DEVICE) for kind in (ThresholdRelativeAttention, Twice))
    twice.load_state_dict(layer.state_dict())
    x = torch.randn(2, 40, 32, device=DEVICE)
    bias = layer.out.bias
    torch.testing.assert_close(twice(x) - bias, 2 * (layer(x) - bias))


def test_whom_it_is_for() -> None:
    query, value = torch.zeros(1, 1, 4, 16, device=DEVICE), torch.zeros(1, 1, 4, 16, device=DEVICE)
    assert takes_norm(query, value, "triton")
    assert not takes_norm(query.double(), value.double(), "triton")
    assert not takes_norm(query, value, "blockwise")
    assert takes_norm(query, value, "auto") == (DEVICE == "cuda")
