"""The operator on a CUDA device: the same rule, bf16 included."""

from __future__ import annotations

import pytest
import torch

import tra
from tests.ops.compare import Inputs, assert_within_rule, causal, exact_inputs, rounding_floor, run, run_plain

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 63, 111, 257, 1000])
def test_by_the_rule(length: int, dtype: torch.dtype, impl: str) -> None:
    inputs = Inputs(
        *(
            x.detach().cuda().requires_grad_()
            for x in exact_inputs(length, heads=4, kv_heads=2, n_queries=length, dtype=dtype)
        )
    )
    grad_out = torch.randn(2, 4, length, 16, device="cuda").to(dtype)
    assert_within_rule(
        run(inputs, grad_out, impl),
        run_plain(inputs, grad_out, causal(length, length).cuda()),
        run(inputs.to(torch.float64), grad_out, "reference"),
        rounding_floor(inputs, grad_out),
    )


@pytest.mark.parametrize(
    ("impl", "length"), [("reference", n) for n in (54, 103, 104, 200, 256, 257, 512)] + [("blockwise", 200)]
)
def test_compiled(impl: str, length: int) -> None:
    """At lengths that are no power of two as well: a compiler has got those wrong."""
    inputs = Inputs(*(x.detach().cuda().requires_grad_() for x in exact_inputs(0, n_queries=length)))
    mask = torch.rand(2, length, device="cuda") > 0.2

    def attend(*args: torch.Tensor) -> torch.Tensor:
        return tra.threshold_relative_attention(*args, key_mask=mask, impl=impl)

    out, expected = torch.compile(attend, fullgraph=True)(*inputs), attend(*inputs)
    torch.testing.assert_close(out, expected)
    for a, b in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
