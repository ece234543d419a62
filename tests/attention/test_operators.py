"""The small operators that keep a compiler out: registered as torch wants them, with the right gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tra.attention.entmax import entmax15
from tra.attention.shared.rotation import rotations
from tra.ops.compiler_workarounds import (
    count_from_the_right,
    entmax_weights,
    halved_below_zero,
    softmax_or_nothing,
    sum_from_the_right,
)


def logits() -> Tensor:
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[..., 3:] = x[..., 3:].masked_fill(x[..., 3:] < 0, -torch.inf)
    return x.requires_grad_()


CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "softmax": (softmax_or_nothing, lambda: (logits(),)),
    "sums": (sum_from_the_right, lambda: (torch.randn(2, 9, dtype=torch.float64, requires_grad=True),)),
    "halved": (halved_below_zero, lambda: (logits(),)),
    "entmax": (entmax_weights, lambda: (logits(), torch.full((2, 3, 5, 1), -0.5).double())),
    "rotations": (rotations, lambda: (torch.arange(6)[None], 8, 500.0, torch.float32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CALLS))
def test_registered_as_torch_wants_it(name: str) -> None:
    operator, arguments = CALLS[name]
    torch.library.opcheck(operator.operator, arguments())


def test_softmax_is_softmax_and_nothing_is_nothing() -> None:
    x = logits()
    with torch.no_grad():
        x[0, 0, 0] = -torch.inf
        x[1, 2, 4, 1] = torch.nan
    weights = softmax_or_nothing(x)
    assert torch.equal(weights[0, 0, 0], torch.zeros(7).double())
    assert weights[1, 2, 4].isnan().all()
    torch.testing.assert_close(weights[1, 0], x[1, 0].softmax(-1))
    (gradient,) = torch.autograd.grad(weights[:, :2].square().sum(), x)
    assert torch.equal(gradient[0, 0, 0], torch.zeros(7).double())
    (expected,) = torch.autograd.grad(x[1, 0].softmax(-1).square().sum(), x)
    torch.testing.assert_close(gradient[1, 0], expected[1, 0])


@pytest.mark.parametrize("function", [sum_from_the_right, softmax_or_nothing, entmax15])
def test_gradients_by_differences(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(function, (x,))


def test_counts() -> None:
    kept = torch.rand(3, 4, 50, generator=torch.Generator().manual_seed(0)) > 0.5
    counts = count_from_the_right(kept, torch.float32)
    for place in range(50):
        assert torch.equal(counts[..., place], kept[..., place:].sum(-1).float())
