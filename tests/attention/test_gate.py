"""The forget gate as sums, the compiler's form, against the definition in float64 and the plain form's error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention.shared import forget_gate as _gate
from tra.attention.shared.forget_gate import MAX_HEADS_FOR_SUMS, ForgetGate, log_gate_by_sums, sums_are_best

NAMES = ("gate", "x", "weight", "bias")


def given(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    sizes = ((3, 70, 48), (4, 48), (4,))
    return [torch.randn(size, generator=draws).to(dtype).requires_grad_() for size in sizes]


def of(gate: Tensor, inputs: list[Tensor]) -> dict[str, Tensor]:
    wanted = torch.randn(gate.shape, generator=torch.Generator().manual_seed(1)).to(gate.dtype)
    found = (gate.detach(), *torch.autograd.grad(gate, inputs, wanted))
    return dict(zip(NAMES, (x.double() for x in found), strict=True))


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.logsigmoid(F.linear(x, weight, bias)).transpose(1, 2)


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_as_right_as_a_layer(narrow: torch.dtype) -> None:
    """The gate always as in float32, its gradients as those of a layer in `narrow`."""
    right, usual, inputs = given(torch.float64), given(), given()
    expected = of(plain(*right), right)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow == torch.bfloat16):
        allowed = of(plain(*usual), usual)
    in_float32 = plain(*given()).detach().double()
    found = of(log_gate_by_sums(*inputs, narrow), inputs)
    for name in NAMES:
        compared = in_float32 if name == "gate" else allowed[name]
        limit = 2 * (compared - expected[name]).square().mean().sqrt()
        error = (found[name] - expected[name]).square().mean().sqrt()
        assert error <= limit, f"{name}: {error} > {limit}"


def test_gradients_by_differences() -> None:
    inputs = given(torch.float64)
    assert torch.autograd.gradcheck(
        lambda *xs: log_gate_by_sums(*xs, torch.float64), [x[:1, :5] if x.ndim == 3 else x for x in inputs]
    )


@pytest.mark.parametrize("enabled", [False, True])
def test_the_layer_takes_them(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as one graph, and in float32 also under autocast, of the x that it gives to a layer."""
    torch.manual_seed(0)
    layer, (x, _, _) = ForgetGate(48, 4, 0.5, fused=True), given()
    expected = layer(x.to(torch.bfloat16) if enabled else x)
    taken = []

    def sums(*arguments: object) -> Tensor:
        taken.append(arguments[3])
        return log_gate_by_sums(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_gate, "sums_are_best", lambda *_: True)
    monkeypatch.setattr(_gate, "log_gate_by_sums", sums)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        found = layer(x)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert taken[0] == (torch.bfloat16 if enabled else torch.float32)
    assert found.dtype == compiled.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(compiled, expected)
    grads = [torch.autograd.grad(y.sum(), [x, *layer.parameters()]) for y in (found, compiled)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("dtype", "autocast", "expected"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float32),  # which would overflow unless the loss is scaled
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float64, torch.bfloat16, torch.float64),
    ],
)
def test_the_precision_of_its_gradients(
    dtype: torch.dtype, autocast: torch.dtype | None, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(_gate, "sums_are_best", lambda *_: True)
    monkeypatch.setattr(_gate, "log_gate_by_sums", lambda *given: found.append(given[3]))
    layer, x = ForgetGate(8, 2, 0.0, fused=True).to(dtype), torch.zeros(1, 2, 8, dtype=dtype)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        layer(x)
    assert found == [expected]


def test_twice_differentiated_is_an_error() -> None:
    x, weight, bias = given()
    gate = log_gate_by_sums(x, weight, bias, torch.bfloat16)
    (grad,) = torch.autograd.grad(gate.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_where_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, by the compiler, for few heads."""
    x = torch.zeros(1, 2, 8)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not sums_are_best(x, 4)
    on_gpu = type("OnGpu", (), {"is_cuda": True})()
    assert sums_are_best(on_gpu, MAX_HEADS_FOR_SUMS)
    assert not sums_are_best(on_gpu, MAX_HEADS_FOR_SUMS + 1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    assert not sums_are_best(on_gpu, 4)
