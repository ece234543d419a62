"""A layer's projections, norm and attention as one operator, against float64 and PyTorch's own parts.

x and the weights are small whole numbers over powers of two, and rows of queries and keys plus or minus one number, of
odd widths: products are exact in any precision and no score is near 0, so all keep the same keys.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

import tra
from tests.ops.compare import causal
from tests.ops.test_fused import DEVICE, DTYPES, MOSTLY_HALF
from tests.slow import slow
from tra.attention import ThresholdRelativeAttention
from tra.attention import tra as layer_file
from tra.bench.judge import plain_attention
from tra.ops.triton import backward, launch, projection_launch
from tra.ops.triton.projections import Weights, attention_of_projections, takes_projections

pytestmark = pytest.mark.filterwarnings(  # of the interpreter
    "ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"
)
EPS = 1e-6
KINDS = 64


@pytest.fixture(autouse=True)
def stops_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_FULL_WALK_KEYS", 0)


class Case:
    """Every token is a row of a unit matrix, so that what it is projected to is a column of the weights."""

    def __init__(self, length: int, heads: int, kv_heads: int, width: int, gated: bool, dtype: torch.dtype) -> None:
        draws = torch.Generator().manual_seed(length)
        self.n_heads, self.n_kv_heads, self.width, self.dtype = heads, kv_heads, width, dtype

        def signs(rows: int) -> Tensor:
            scale = 2.0 ** torch.randint(-2, 3, (rows // width, 1, KINDS), generator=draws)
            return ((torch.randint(2, (rows // width, width, KINDS), generator=draws) * 2 - 1) * scale).flatten(0, 1)

        value = torch.randint(-8, 9, (kv_heads * width, KINDS), generator=draws) / 4
        gate = torch.randint(-8, 9, (heads, KINDS), generator=draws) / 8
        bias = torch.randint(-8, 9, (heads,), generator=draws) / 8
        gates = [gate, bias] if gated else []
        self.x = torch.eye(KINDS)[torch.randint(KINDS, (2, length), generator=draws)]
        self.weights = [signs(heads * width), signs(kv_heads * width), value, *gates]
        self.grad_out = torch.randn(2, heads, length, width, generator=draws)

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        """x in a dtype; weights, as a model has them, in float32 or more."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        dtypes = [dtype, *[wide] * len(self.weights)]
        return [y.to(DEVICE, d).requires_grad_() for y, d in zip([self.x, *self.weights], dtypes, strict=True)]

    def log_forget(self, x: Tensor, gates: list[Tensor]) -> Tensor:
        if not gates:
            return torch.zeros(x.shape[0], self.n_heads, x.shape[1], device=DEVICE, dtype=torch.float64)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        logits = F.linear(x.to(wide), *(y.to(wide) for y in gates))
        rounded = F.linear(x, *(y.to(x.dtype) for y in gates)).to(wide)  # whose gradient has x's precision
        return F.logsigmoid(rounded + (logits - rounded).detach()).transpose(1, 2)

    def results(self, out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        return [y.double() for y in (out.detach(), *torch.autograd.grad(out, leaves, self.grad_out.to(out)))]

    def by_parts(self, dtype: torch.dtype, margin: float = 0.0) -> list[Tensor]:
        """PyTorch's projections and norm, and the definition in float64 or the form without thought of precision."""
        leaves = self.leaves(dtype)
        x, weights, gates = leaves[0], leaves[1:4], leaves[4:]
        query, key, value = (F.linear(x, y.to(dtype)).unflatten(2, (-1, self.width)).transpose(1, 2) for y in weights)
        query, key = (F.rms_norm(y, (self.width,), eps=EPS).to(dtype) for y in (query, key))
        log_forget = self.log_forget(x, gates)
        if dtype == torch.float64:
            out = tra.threshold_relative_attention(query, key, value, log_forget, margin=margin, impl="reference")
            return self.results(out, leaves)
        key, value = (y.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for y in (key, value))
        seen = causal(x.shape[1], x.shape[1]).to(DEVICE)
        return self.results(plain_attention(query, key, value, log_forget.float(), seen, margin=margin), leaves)

    def at_once(self, **options: float | None) -> list[Tensor]:
        leaves = self.leaves(self.dtype)
        out = attention_of_projections(leaves[0], Weights(*leaves[1:]), n_heads=self.n_heads, eps=EPS, **options)
        return self.results(out, leaves)


SHAPES = {
    "plain": (100, 2, 2, 15, True),
    "grouped": (70, 4, 2, 25, True),
    "no gates": (70, 2, 1, 17, False),
    "many heads": (40, 17, 17, 5, True),
    "chunks": (200, 2, 2, 15, True),
}


@MOSTLY_HALF
@pytest.mark.parametrize("score_bound", [5.1, *slow(None)], ids=["fixed", "online"])
@pytest.mark.parametrize("shape", ["plain", "grouped", "no gates", "chunks", *slow("many heads")])
def test_results_and_gradients(
    shape: str, score_bound: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shape == "chunks":
        monkeypatch.setattr(backward, "_transient_bytes", lambda _: 1)
    case = Case(*SHAPES[shape], dtype)
    compare(case.by_parts(torch.float64), case.by_parts(dtype), case.at_once(score_bound=score_bound))


@MOSTLY_HALF
@pytest.mark.parametrize(("margin", "score_bound"), [(0.5, 5.1), *slow((0.5, None), (math.inf, 5.1), (math.inf, None))])
def test_margins(margin: float, score_bound: float | None, dtype: torch.dtype) -> None:
    """Scores are odd multiples of 1/√15: none is near the cut at -0.5."""
    case = Case(*SHAPES["plain"], dtype)
    right, without = case.by_parts(torch.float64, margin), case.by_parts(torch.float64)
    assert not torch.allclose(right[0], without[0], atol=0.1)
    compare(right, case.by_parts(dtype, margin), case.at_once(margin=margin, score_bound=score_bound))


def compare(right: list[Tensor], usual: list[Tensor], found: list[Tensor]) -> None:
    """Compare output and gradients: at most twice the error of the usual form."""
    assert len(found) == len(right)
    joined = [[*y[:5], torch.cat([z.flatten() for z in y[5:]])] if y[5:] else y for y in (found, right, usual)]
    for name, got, wanted, other in zip(("out", "x", *Weights._fields), *joined, strict=False):
        error, allowed = ((y - wanted).square().mean().sqrt() for y in (got, other))
        assert error <= 2 * allowed, f"{name}: {error} > 2 · {allowed}"


def test_what_is_normalised_is_pytorchs_norm() -> None:
    """And values stay as they are."""
    draws = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        packed = torch.randn(2, 70, 4 * 24, generator=draws).to(DEVICE, dtype)
        before = packed.clone()
        of_query, of_key = projection_launch.normalise(packed, 2, 1, 24, EPS)
        query, key, value, _ = projection_launch.split_heads(before, 2, 1, 24)
        found = projection_launch.split_heads(packed, 2, 1, 24)
        torch.testing.assert_close(found.query, F.rms_norm(query, (24,), eps=EPS))
        torch.testing.assert_close(found.key, F.rms_norm(key, (24,), eps=EPS))
        assert torch.equal(found.value, value)
        torch.testing.assert_close((query * of_query[..., None]).to(dtype), found.query)
        torch.testing.assert_close((key * of_key[..., None]).to(dtype), found.key)


@DTYPES
@pytest.mark.parametrize(("columns", "heads"), [(48, 4), (600, 3), (16, 130)])
def test_gates_are_in_float32(columns: int, heads: int, dtype: torch.dtype) -> None:
    """Also those that hardly forget, and those that forget all; of inputs in half precision too."""
    draws = torch.Generator().manual_seed(columns)
    x = torch.randn(2, 37, columns, generator=draws).to(DEVICE, dtype)
    weight = (torch.randn(heads, columns, generator=draws) / 8).to(DEVICE)
    for shift in (0.0, 5.0, 12.0, -80.0):
        bias = torch.full((heads,), shift, device=DEVICE)
        right = F.logsigmoid(F.linear(x.double(), weight.double(), bias.double())).transpose(1, 2)
        usual = F.logsigmoid(F.linear(x.float(), weight, bias)).transpose(1, 2)
        found = projection_launch.gates(x, weight, bias, heads)
        assert found.dtype == torch.float32
        error, allowed = (((y - right) / right).square().mean().sqrt() for y in (found, usual))
        assert error <= 2 * max(allowed, torch.finfo(torch.float32).eps), f"{error} > 2 · {allowed}"


def test_gates_that_are_no_numbers() -> None:
    """NaN in, NaN out; the infinite ones as PyTorch has them."""
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0], device=DEVICE).repeat(16, 1).T[None].contiguous()
    weight, bias = torch.ones(1, 16, device=DEVICE), torch.zeros(1, device=DEVICE)
    found = projection_launch.gates(x, weight, bias, 1)
    torch.testing.assert_close(found, F.logsigmoid(F.linear(x, weight, bias)).transpose(1, 2), equal_nan=True)


@pytest.mark.parametrize(("rows", "heads"), [(1, 5), (300, 70), (9000, 5)])
def test_the_gradient_of_the_bias(rows: int, heads: int) -> None:
    """A sum in float32, of columns between others, whatever is left for the last block."""
    x = torch.randn(1, rows, heads + 8, generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    expected = x[..., 3 : 3 + heads].double().sum((0, 1)).float()
    torch.testing.assert_close(projection_launch.bias_gradient(x[..., 3 : 3 + heads]), expected, rtol=1e-5, atol=1e-4)


def test_the_operators_are_what_they_say() -> None:
    """Shapes, strides and gradients as registered."""
    case = Case(40, 2, 1, 16, True, torch.float32)
    x, query, key, value, gate, bias = case.leaves(torch.float32)
    joint = F.pad(torch.cat([query, key, value, gate]), (0, 0, 0, 14)).detach().requires_grad_()
    arguments = (x, joint, gate.detach(), bias, None, 2, 1, 16, EPS, 0.0, 0.0, 4.1, 0.0, 1e-6)
    torch.library.opcheck(torch.ops.tra.projected_forward.default, arguments)


def test_a_fused_layer_takes_it_in_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only there; with the gradients of an unfused one."""
    torch.manual_seed(0)
    layer = ThresholdRelativeAttention(32, 2, impl="triton", fuse_projections=True).to(DEVICE)
    x = torch.randn(2, 40, 32, device=DEVICE, requires_grad=True)
    calls = []
    original = layer_file.attention_of_projections

    def count(x: Tensor, weights: Weights, **options: float) -> Tensor:
        calls.append(1)
        return original(x, weights, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(layer_file, "attention_of_projections", count)
    parameters = [x, *layer.parameters()]
    fast = torch.autograd.grad(layer(x).square().sum(), parameters)
    assert len(calls) == 1
    usual = torch.autograd.grad(layer(x, torch.ones(2, 40, dtype=torch.bool, device=DEVICE)).square().sum(), parameters)
    with torch.no_grad():
        layer(x)
    layer.fuse_projections = False
    unfused = torch.autograd.grad(layer(x).square().sum(), parameters)
    layer.fuse_projections, layer.impl = True, "blockwise"
    layer(x)
    assert len(calls) == 1
    for other in (usual, unfused):
        for one, two in zip(fast, other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_a_model_in_half_precision() -> None:
    """Weights, bias and all: gradients have their dtypes."""
    torch.manual_seed(0)
    layer = ThresholdRelativeAttention(32, 2, impl="triton", fuse_projections=True).to(DEVICE, torch.float16)
    x = torch.randn(2, 40, 32, device=DEVICE, dtype=torch.float16)
    layer(x).float().square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float16
        assert math.isfinite(parameter.grad.float().norm())
        assert parameter.grad.any()


def test_dtypes_that_do_not_fit_are_an_error() -> None:
    x = torch.randn(2, 40, 32, device=DEVICE)
    layer = ThresholdRelativeAttention(32, 2, impl="triton", fuse_projections=True).to(DEVICE)
    layer.k_proj.double()
    with pytest.raises(RuntimeError, match="dtype"):
        layer(x)


@pytest.mark.parametrize("shape", [(0, 5, 32), (2, 0, 32)])
def test_empty_inputs_are_an_error(shape: tuple[int, ...]) -> None:
    layer = ThresholdRelativeAttention(32, 2, impl="triton", fuse_projections=True).to(DEVICE)
    with pytest.raises(ValueError, match=r"x is empty: got shape .*, expected every dimension to be at least 1"):
        layer(torch.zeros(shape, device=DEVICE))


def test_dropout_is_the_operators() -> None:
    """With the same draws: those of the seed that the next call takes."""
    layer = ThresholdRelativeAttention(32, 2, impl="triton", fuse_projections=True, dropout=0.3).to(DEVICE)
    x = torch.randn(2, 40, 32, device=DEVICE)
    outs = []
    for mask in (None, torch.ones(2, 40, dtype=torch.bool, device=DEVICE)):
        torch.manual_seed(5)
        outs.append(layer(x, mask))
    torch.testing.assert_close(*outs)
    assert not torch.equal(layer(x), outs[0])


def test_only_what_is_wanted_is_worked_out() -> None:
    """A frozen layer still passes gradients on; without those of x weights still have theirs."""
    torch.manual_seed(0)
    layer = ThresholdRelativeAttention(32, 2, impl="triton", fuse_projections=True).to(DEVICE)
    x = torch.randn(2, 40, 32, device=DEVICE, requires_grad=True)
    weights = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight, *layer.gate.parameters()]
    of_x, *of_weights = torch.autograd.grad(layer(x).square().sum(), [x, *weights])
    alone = torch.autograd.grad(layer(x.detach()).square().sum(), weights)
    assert all(torch.equal(one, other) for one, other in zip(alone, of_weights, strict=True))
    layer.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(layer(x).square().sum(), x)[0], of_x)
    layer.gate.requires_grad_(True)
    assert torch.equal(torch.autograd.grad(layer(x).square().sum(), layer.gate.linear.bias)[0], of_weights[4])


def test_any_layout_in_memory() -> None:
    """Of x, and of weights that someone else hands in."""
    torch.manual_seed(0)
    layer = ThresholdRelativeAttention(32, 2, impl="triton", fuse_projections=True).to(DEVICE)
    x = torch.randn(2, 40, 32, device=DEVICE)
    out = layer(x)
    torch.testing.assert_close(layer(x.transpose(1, 2).contiguous().transpose(1, 2)), out)
    handed = {name: torch.stack([y, y + 1], -1)[..., 0] for name, y in layer.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(layer, handed, (x,)), out)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool) -> None:
    torch.manual_seed(0)
    layer = ThresholdRelativeAttention(32, 2, impl="triton", fuse_projections=True, dropout=0.3).to(DEVICE)
    x = torch.randn(2, 40, 32, device=DEVICE, requires_grad=True)
    found = []
    for through in (layer, lambda y: torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=reentrant)):
        torch.manual_seed(5)
        layer.zero_grad()
        through(x).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in layer.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_under_autocast() -> None:
    """Half precision in, float32 weights' gradients out; as near to float32 as the other way is."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    torch.manual_seed(0)
    layer = ThresholdRelativeAttention(32, 2, impl="triton", fuse_projections=True, threshold=-math.inf).to(DEVICE)
    x = torch.randn(2, 40, 32, device=DEVICE, requires_grad=True)
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    found = []
    for precise, given in ((True, None), (False, None), (False, mask)):
        with torch.autocast(DEVICE, dtype, enabled=not precise):
            out = layer(x, given)
        found.append(torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()]))
    for right, one, other in zip(*found, strict=True):
        assert one.dtype == torch.float32
        error, allowed = ((y - right).square().mean().sqrt() for y in (one, other))
        assert error <= 2 * allowed


@pytest.mark.parametrize("mechanism", ["tra", "tra-threshold-only"])
def test_compiled(mechanism: str) -> None:
    """As one graph, with the gradients that it has uncompiled: both ways in float32, so only sums' order differs."""
    torch.manual_seed(0)
    layer = tra.attention.MECHANISMS[mechanism](32, 2, impl="triton", fuse_projections=True).to(DEVICE)
    x = torch.randn(2, 40, 32, device=DEVICE, requires_grad=True)
    parameters = [x, *layer.parameters()]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x).square().sum(), parameters)
    usual = torch.autograd.grad(layer(x).square().sum(), parameters)
    for one, other in zip(found, usual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_whom_it_is_for() -> None:
    device = torch.device(DEVICE)
    assert takes_projections(device, torch.float32, 16, "triton")
    assert not takes_projections(device, torch.float64, 16, "triton")
    assert not takes_projections(device, torch.float32, 512, "triton")
    assert not takes_projections(device, torch.float32, 16, "blockwise")
    assert takes_projections(device, torch.float32, 16, "auto") == (DEVICE == "cuda")
