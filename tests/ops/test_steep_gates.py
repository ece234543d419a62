"""Gates that forget at once: what the nearest kept key weighs must not drown in the size of its bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tra
from tests.ops.compare import exact_inputs
from tests.ops.test_fused import DEVICE
from tests.slow import slow

SLOPES = (-1e4, -1e7, *slow(-1e-3, -1.0, -30.0, -1e2, -1e6, -1e10, -1e20, -1e30))
IMPLEMENTATIONS = ("triton", "blockwise")
CASES = (
    (torch.float32, None),
    (torch.float16, None),
    *slow((torch.float32, 8.0), (torch.float16, 8.0)),
)


def gradients(impl: str, dtype: torch.dtype, slope: float, bound: float | None, **options: object) -> list[Tensor]:
    inputs = exact_inputs(5, batch=1, n_queries=70, dtype=dtype).on(DEVICE)
    forget = torch.full_like(inputs.log_forget, slope).requires_grad_()
    leaves = (*inputs[:3], forget)
    out = tra.threshold_relative_attention(*leaves, impl=impl, score_bound=bound, **options)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad_out))]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "bound"), CASES)
@pytest.mark.parametrize("slope", SLOPES)
def test_gradients_at_steep_gates(impl: str, dtype: torch.dtype, bound: float | None, slope: float) -> None:
    """Against float64, relative to the largest entry. Half precision rounds its results, float32 hardly."""
    allowed = 4e-6 if dtype == torch.float32 else 4e-3
    # With this scale scores have digits to lose; by a power of two they would stay exact beside a slope of -1e4.
    ours = gradients(impl, dtype, slope, bound, scale=0.3)
    exact = gradients("reference", torch.float64, slope, None, scale=0.3)
    for name, got, right in zip(("output", "query", "key", "value", "log_forget"), ours, exact, strict=True):
        assert (got - right).abs().max() <= allowed * max(1.0, float(right.abs().max())), name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_values_near_the_largest_float(impl: str) -> None:
    """No sum on the way overflows: an average of values is never larger than the values."""
    inputs = [x.detach() for x in exact_inputs(6, batch=1, n_queries=70).on(DEVICE)]
    for scale in (3e38, 1e-30):
        value = inputs[2].sign() * scale
        out = tra.threshold_relative_attention(*inputs[:2], value, 0.01 * inputs[3], impl=impl)
        exact = tra.threshold_relative_attention(*inputs[:2], value.sign(), 0.01 * inputs[3], impl="reference")
        torch.testing.assert_close(out.double() / scale, exact.double(), atol=2e-6, rtol=1e-5)
