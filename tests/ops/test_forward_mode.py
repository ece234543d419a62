"""Forward-mode derivatives are right, or an error: never a silent 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tra
from tests.ops.compare import exact_inputs
from tests.ops.test_fused import DEVICE
from tra.attention import MECHANISMS, Attention
from tra.ops.linear_cross_entropy import linear_cross_entropy


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("length", [20, 600])
def test_the_operator(impl: str, length: int) -> None:
    """Against reverse mode: one number of J v, as v is given, and of wᵀ J."""
    inputs = tuple(x.detach() for x in exact_inputs(3, batch=1, heads=1, n_queries=length, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    tangents = tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs)

    def function(*leaves: Tensor) -> Tensor:
        return tra.threshold_relative_attention(*leaves, impl=impl)

    out, derivative = torch.func.jvp(function, inputs, tangents)
    weights = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    leaves = tuple(x.requires_grad_() for x in inputs)
    gradients = torch.autograd.grad(function(*leaves), leaves, weights)
    expected = sum(float((gradient * tangent).sum()) for gradient, tangent in zip(gradients, tangents, strict=True))
    assert float((derivative * weights).sum()) == pytest.approx(expected, rel=1e-9)
    assert derivative.abs().max() > 0


def test_a_jacobian_of_rows_that_keep_nothing() -> None:
    inputs = [x.detach() for x in exact_inputs(3, batch=1, heads=1, n_queries=6, width=4, dtype=torch.float64)]
    inputs[0][:, :, 2] = 0.0

    def function(value: Tensor) -> Tensor:
        return tra.threshold_relative_attention(inputs[0], inputs[1], value, inputs[3])

    forward, reverse = torch.func.jacfwd(function)(inputs[2]), torch.func.jacrev(function)(inputs[2])
    torch.testing.assert_close(forward, reverse)
    assert not forward[:, :, 2].any()
    assert forward.isfinite().all()


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_implementations_without_it_say_so(impl: str) -> None:
    inputs = tuple(x.detach() for x in exact_inputs(3, n_queries=8).on(DEVICE))
    with pytest.raises(RuntimeError, match=f"impl='{impl}' has no forward-mode derivative"):
        torch.func.jvp(lambda *x: tra.threshold_relative_attention(*x, impl=impl), inputs, inputs)


@pytest.mark.parametrize("mechanism", [name for name, kind in MECHANISMS.items() if issubclass(kind, Attention)])
def test_layers(mechanism: str) -> None:
    """Every mechanism: right by reverse mode, or an error."""
    torch.manual_seed(0)
    layer = MECHANISMS[mechanism](16, 2).double()
    x, tangent = torch.randn(2, 1, 9, 16, dtype=torch.float64)
    try:
        out, derivative = torch.func.jvp(layer, (x,), (tangent,))
    except (RuntimeError, NotImplementedError):
        assert mechanism in ("entmax", "sinusoidal", "rope", "nope", "alibi", "ssmax", "differential", "selective")
        return
    weights = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(layer(x.requires_grad_()), x, weights)
    assert float((derivative * weights).sum()) == pytest.approx(float((gradient * tangent).sum()), rel=1e-7)


def test_the_loss_of_a_large_vocabulary() -> None:
    x, weight = torch.randn(4, 8), torch.randn(20, 8)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no forward-mode derivative"):
        torch.func.jvp(lambda y: linear_cross_entropy(y, weight, torch.arange(4), torch.ones(4)).loss, (x,), (x,))
