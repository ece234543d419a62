"""The plain form of every entry of `tra.ops.compiler_workarounds`: once one is right, its workaround can go."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.exc import InductorError

from tests.ops.compare import Inputs, causal, exact_inputs, run
from tra.bench.judge import error_ratio, plain_attention
from tra.ops import compiler_workarounds
from tra.ops.compiler_workarounds import truncate_to_bfloat16
from tra.ops.dropout import _hash32, keep_weights
from tra.ops.options import AttentionOptions
from tra.ops.triton import block_shapes, decode

pytestmark = pytest.mark.gpu
LENGTHS = (54, 103, 257, 1100)


def still_needed(plain_is_right: bool) -> None:
    assert not plain_is_right, "the workaround can go"


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=False)


def close(got: Tensor, expected: Tensor) -> bool:
    return torch.allclose(got, expected, rtol=1e-4, atol=1e-4, equal_nan=False)


def plain_counts(kept: Tensor) -> Tensor:
    return kept.float().flip(-1).cumsum(-1).flip(-1)


def plain_map(query: Tensor, key: Tensor, log_forget: Tensor) -> Tensor:
    """Weights as `full_map.py` has them, without an operator of our own."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    kept = ~(scores <= 0) & torch.ones_like(scores, dtype=torch.bool).tril()
    logits = torch.where(kept, scores + log_forget[..., None] * plain_counts(kept), -torch.inf)
    nothing = logits.amax(-1, keepdim=True) == -torch.inf
    return logits.softmax(-1).masked_fill(nothing, 0.0)


def plain_entmax(logits: Tensor) -> Tensor:
    """`entmax15` of `tra.attention.entmax`, without an operator of our own."""
    x = logits / 2
    x = x - x.amax(-1, keepdim=True)
    threshold = torch.full_like(x[..., :1], -1.0)
    for _ in range(12):
        above = (x - threshold).clamp(min=0)
        threshold = threshold + (above.square().sum(-1, keepdim=True) - 1) / (2 * above.sum(-1, keepdim=True))
    return (x - threshold).clamp(min=0).square()


def test_rows_that_are_read_back() -> None:
    """Entry 1. Softmax, running sums, counts and entmax: all right at all lengths, forward and backward?"""
    right = []
    for length in LENGTHS:
        query, key, _, log_forget = exact_inputs(0, batch=8, heads=4, n_queries=length).on("cuda")
        upstream = torch.randn(8, 4, length, length, device="cuda")
        for function, inputs in ((plain_map, (query, key, log_forget)), (plain_entmax, (query @ key.mT,))):
            leaves = [x.detach().requires_grad_() for x in inputs]
            found, expected = (
                (out, *torch.autograd.grad(out, leaves, upstream))
                for out in (compiled(function)(*leaves), function(*leaves))
            )
            right.append(all(close(a, b) for a, b in zip(found, expected, strict=True)))
    still_needed(all(right))


def test_a_cast_to_bfloat16_and_back() -> None:
    """Entry 2."""

    def remainder(x: Tensor) -> Tensor:
        return x - x.bfloat16().float()

    x = torch.randn(1000, device="cuda")
    by_bits = compiled(lambda y: y - truncate_to_bfloat16(y))
    assert torch.equal(by_bits(x), x - truncate_to_bfloat16(x))
    still_needed(torch.equal(compiled(remainder)(x), remainder(x)))


def test_arithmetic_on_bare_indices() -> None:
    """Entry 3. Indices are multiplied before a seed comes in: the product needs 64 bits."""
    low = 0xFFFFFFFF

    def plain(seed: Tensor, x: Tensor) -> Tensor:
        rows, columns = torch.arange(len(x), device=x.device), torch.arange(x.shape[1], device=x.device)
        state = _hash32(rows * 0x846CA68B & low)[:, None] ^ (columns * 0x9E3779B9 & low)
        return _hash32(state + seed & low)

    def ours(seed: Tensor, x: Tensor) -> Tensor:
        rows, columns = torch.arange(len(x), device=x.device), torch.arange(x.shape[1], device=x.device)
        return keep_weights(seed, rows, columns, 0.3)

    seed, x = torch.tensor([123_456_789], device="cuda"), torch.zeros(300, 500, device="cuda")
    assert torch.equal(compiled(ours)(seed, x), ours(seed, x))
    try:
        found = compiled(plain)(seed, x)
    except InductorError:
        return  # with a constant beyond 32 bits it doesn't compile at all
    still_needed(torch.equal(found, plain(seed, x)))


def test_flex_attention_at_any_length() -> None:
    """Entry 4."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    right = []
    for length, dtype in itertools.product((54, 130, 200), (torch.float32, torch.bfloat16)):
        drawn = exact_inputs(1, n_queries=length, width=64, dtype=dtype).on("cuda")
        query, key, value, _ = Inputs(*(x.detach() for x in drawn))
        slope = torch.rand(2, 2, length, device="cuda")  # per query, as gates are

        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, slope: Tensor = slope) -> Tensor:
            return x - slope[b, h, i] * (i - j)

        mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length, device="cuda")

        def attend(*inputs: Tensor, score=score, mask=mask) -> Tensor:  # type: ignore[no-untyped-def]
            return flex_attention(*inputs, score, mask)

        leaves = [x.requires_grad_() for x in (query, key, value)]
        place = torch.arange(length, device="cuda")
        bias = -slope[..., None] * (place[:, None] - place)
        bias = bias.masked_fill(place[:, None] < place, -torch.inf).to(dtype)
        found = torch.autograd.grad(compiled(attend)(*leaves).square().sum(), leaves)
        expected = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, attn_mask=bias).square().sum(), leaves)
        right.append(all(torch.allclose(a, b, rtol=5e-2, atol=0.2) for a, b in zip(found, expected, strict=True)))
    still_needed(all(right))


def test_rows_of_24_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry 5. Strides as they are, in units of one number."""
    import triton

    if not triton.__version__.startswith("3.6"):
        pytest.skip("Triton brings another ptxas")
    ratios: dict[int, list[float]] = {compiler_workarounds.MAX_STRIDE_UNIT: [], 1: []}
    for width, values, dtype in itertools.product((24, 40), (248, 64, 232), (torch.bfloat16, torch.float16)):
        inputs = [x.detach() for x in exact_inputs(24, batch=1, heads=2, n_queries=2, n_keys=70, width=width,
                                                   value_width=values, dtype=dtype).on("cuda")]  # fmt: skip
        exact = run(Inputs(*inputs).to(torch.float64), torch.zeros(1, 2, 2, values, device="cuda"), "reference")[0]
        plain = plain_attention(*inputs, causal(2, 70).cuda())
        options = AttentionOptions.resolve(width, dtype)
        for unit, found in ratios.items():
            monkeypatch.setattr(compiler_workarounds, "MAX_STRIDE_UNIT", unit)
            monkeypatch.setattr(block_shapes, "_chosen", {})
            got = decode.decode_attention(*inputs, None, None, None, options, piece=32)
            found.append(error_ratio(got, plain, exact))
    ours, without = ratios.values()
    assert max(ours) <= 1
    still_needed(max(without) <= 1)


def test_graphs_that_are_exported() -> None:
    """Entry 6."""

    def say(x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_exporting() else x

    def ours(x: Tensor) -> Tensor:
        return x + 1 if compiler_workarounds.is_exporting() else x

    x = torch.zeros(2, device="cuda")
    assert not compiled(ours)(x).any()
    still_needed(not compiled(say)(x).any())
