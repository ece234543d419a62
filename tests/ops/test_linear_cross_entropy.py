"""The last layer with its loss against PyTorch's own, in float64; on a CPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.slow import slow
from tra.ops import linear_cross_entropy as module
from tra.ops.linear_cross_entropy import linear_cross_entropy, rows_at_once

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton")


@pytest.fixture(params=["plain", "kernel"])
def rows_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU takes the plain form by itself, a GPU the kernel."""
    if ON_GPU and request.param == "plain":
        pytest.skip("a GPU takes the kernel")
    if request.param == "kernel":
        monkeypatch.setattr(module, "_softmax_rows", module._by_kernel)
    return request.param


def given(rows: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(rows + vocabulary)
    x = torch.randn(rows, width).to(DEVICE, dtype).requires_grad_()
    weight = torch.randn(vocabulary, width).to(DEVICE, dtype).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    counted = (torch.rand(rows, device=DEVICE) < 0.8).float()
    return x, weight, targets, counted / counted.sum().clamp(min=1)


def expected(x: Tensor, weight: Tensor, targets: Tensor, row_weights: Tensor, rounded: bool) -> list[Tensor]:
    """Loss, losses and both gradients, in float64 or with logits and their gradient rounded to the dtype."""
    x, weight = (y.detach().double().requires_grad_() for y in (x, weight)) if not rounded else (x, weight)
    logits = x @ weight.t()
    losses = F.cross_entropy(logits.double() if not rounded else logits.float(), targets, reduction="none")
    loss = (losses * row_weights).sum()
    return [loss.detach(), losses.detach(), *torch.autograd.grad(loss, (x, weight))]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt())


@DTYPES
@pytest.mark.parametrize(
    ("rows", "width", "vocabulary"), [(1, 8, 5), (130, 24, 9001), *slow((63, 16, 257), (300, 32, 4097))]
)
def test_loss_and_gradients(
    rows: int, width: int, vocabulary: int, dtype: torch.dtype, rows_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Error at most twice that of PyTorch in the same type, and in several pieces."""
    monkeypatch.setattr(module, "MAX_PIECE_BYTES", 1)  # 128 rows at a time
    inputs = given(rows, width, vocabulary, dtype)
    scored = linear_cross_entropy(*inputs)
    found = [scored.loss.detach(), scored.losses, *torch.autograd.grad(scored.loss, inputs[:2])]
    exact, plain = expected(*inputs, rounded=False), expected(*inputs, rounded=True)
    for mine, theirs, truth in zip(found, plain, exact, strict=True):
        one_rounding = torch.finfo(mine.dtype).eps * float(truth.double().square().mean().sqrt())
        assert error(mine, truth) <= max(2 * error(theirs, truth), one_rounding)
    assert [y.dtype for y in found] == [torch.float32, torch.float32, dtype, dtype]


def test_right_is_the_first_of_the_likeliest(rows_by: str) -> None:
    """Ties are real in half precision: only the first of equals is the model's answer."""
    x = torch.ones(4, 1, device=DEVICE)
    weight = torch.zeros(6000, 1, device=DEVICE)
    weight[[70, 71, 5000]] = 3.0
    targets = torch.tensor([70, 71, 5000, 0], device=DEVICE)
    scored = linear_cross_entropy(x, weight, targets, torch.ones(4, device=DEVICE))
    assert scored.right.tolist() == [True, False, False, False]


def test_far_logits_and_nan(rows_by: str) -> None:
    x = torch.tensor([[1e4], [-1e4], [float("nan")]], device=DEVICE)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], device=DEVICE)
    scored = linear_cross_entropy(
        x, weight, torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.ones(3, device=DEVICE)
    )
    assert scored.losses[:2].tolist() == [0.0, 2e4]
    assert scored.losses[2].isnan()
    assert scored.loss.isnan()


def test_a_row_that_does_not_count_has_no_gradient(rows_by: str) -> None:
    x, weight, targets, _ = given(5, 4, 300)
    scored = linear_cross_entropy(x, weight, targets, torch.tensor([1.0, 0, 0, 0, 0], device=DEVICE))
    (gradient,) = torch.autograd.grad(scored.loss, x)
    assert gradient[0].abs().sum() > 0
    assert not gradient[1:].any()


def test_autocast_takes_its_type() -> None:
    x, weight, targets, row_weights = given(40, 16, 500)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        scored = linear_cross_entropy(x, weight, targets, row_weights)
    half = linear_cross_entropy(x.bfloat16(), weight.bfloat16(), targets, row_weights)
    assert scored.loss == half.loss
    gradients = torch.autograd.grad(scored.loss, (x, weight))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_without_gradients_none_are_made() -> None:
    x, weight, targets, row_weights = given(40, 16, 500)
    with torch.no_grad():
        out = module._op(x, weight, targets, row_weights, False)
        scored = linear_cross_entropy(x, weight, targets, row_weights)
    assert out[3].numel() == out[4].numel() == 0
    assert not scored.loss.requires_grad


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 8192, 10_000, 16_384])
def test_pieces_are_even_and_small(rows: int) -> None:
    for vocabulary in (100, 50_304, 250_000):
        piece = rows_at_once(rows, vocabulary, 2, 2**29)
        assert piece % 128 == 0
        assert piece == 128 or piece * vocabulary * 2 <= 2**29
        assert -(-rows // piece) * piece - rows < 128 * -(-rows // piece)


def test_opcheck() -> None:
    torch.library.opcheck(module._op, (*given(70, 8, 130), True))
    torch.library.opcheck(module._op, (*(y.detach() for y in given(70, 8, 130)), False))


@pytest.mark.slow
def test_compiled() -> None:
    inputs = given(200, 16, 700)
    plain = linear_cross_entropy(*inputs)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled.losses, plain.losses)
    for mine, theirs in zip(
        torch.autograd.grad(compiled.loss, inputs[:2]), torch.autograd.grad(plain.loss, inputs[:2]), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_bad_shapes() -> None:
    x, weight, targets, row_weights = given(4, 8, 10)
    with pytest.raises(ValueError, match=r"don't fit: got \(4, 8\) and \(10, 7\)"):
        linear_cross_entropy(x, weight[:, :7], targets, row_weights)
    with pytest.raises(ValueError, match=r"must be \[4\], got \(3,\)"):
        linear_cross_entropy(x, weight, targets[:3], row_weights)
