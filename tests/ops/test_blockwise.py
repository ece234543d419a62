"""The walk against the float64 definition, outputs and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tra
from tests.ops import compare
from tests.ops.compare import Inputs, causal, check_checkpointing_repeats_dropout, exact_inputs, padding, run
from tra.ops import block_layout

LENGTHS = (1, 63, 111, 257)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(inputs: Inputs, seen: Tensor, plain_options: dict[str, float] | None = None, **options: object) -> None:
    compare.check(inputs, seen, "blockwise", plain_options, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, dtype: torch.dtype) -> None:
    check(exact_inputs(length, n_queries=length, dtype=dtype), causal(length, length))


@pytest.mark.parametrize("length", LENGTHS)
def test_grouped_heads_other_value_width_and_fewer_queries(length: int) -> None:
    inputs = exact_inputs(length, heads=6, kv_heads=2, n_queries=length, n_keys=length + 130, value_width=24)
    check(inputs, causal(length, length + 130))


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("length", LENGTHS)
def test_padding(length: int, side: str) -> None:
    mask = padding(side, 2, length)
    check(exact_inputs(length, n_queries=length), causal(length, length) & mask[:, None, None], key_mask=mask)


@pytest.mark.parametrize("length", LENGTHS)
def test_key_lengths(length: int) -> None:
    capacity = length + 140
    lengths = torch.tensor([capacity, length // 2 + 1], dtype=torch.int32)
    index = torch.arange(capacity)
    last = lengths[:, None] - length + torch.arange(length)
    check(
        exact_inputs(length, n_queries=length, n_keys=capacity),
        (index <= last[..., None])[:, None],
        key_lengths=lengths,
    )


@pytest.mark.parametrize("threshold", [-0.7, 0.3])
def test_threshold_and_scale(threshold: float) -> None:
    options = {"threshold": threshold, "scale": 0.5}
    check(exact_inputs(1, n_queries=111), causal(111, 111), options, **options)


def test_key_mask_and_key_lengths_together() -> None:
    mask = padding("left", 2, 200)
    lengths = torch.tensor([180, 90], dtype=torch.int32)
    inputs = exact_inputs(2, n_queries=50, n_keys=200)
    seen = (torch.arange(200) <= (lengths[:, None] - 50 + torch.arange(50))[..., None]) & mask[:, None]
    check(inputs, seen[:, None], key_mask=mask, key_lengths=lengths)


def test_the_promised_bound_changes_nothing_but_the_stop() -> None:
    inputs = exact_inputs(3, n_queries=257)
    check(inputs, causal(257, 257), score_bound=16.0)


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_packed_sequences_equal_one_by_one(impl: str) -> None:
    lengths = [5, 1, 300, 0, 94]
    query, key, value, log_forget = exact_inputs(4, batch=1, heads=4, kv_heads=2, n_queries=400, dtype=torch.float64)
    packed = Inputs(*(x[0].transpose(0, 1).detach().requires_grad_() for x in (query, key, value, log_forget)))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    out = tra.threshold_relative_attention_varlen(*packed, cu, impl=impl)
    grads = torch.autograd.grad(out.square().sum(), packed)
    pieces = []
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        if start < end:
            part = (x[:, :, start:end] for x in (query, key, value, log_forget))
            pieces.append(tra.threshold_relative_attention(*part, impl="reference"))
    alone = torch.cat(pieces, 2)
    torch.testing.assert_close(out, alone[0].transpose(0, 1))
    expected = torch.autograd.grad(alone.square().sum(), (query, key, value, log_forget))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want[0].transpose(0, 1))


def test_packed_with_fewer_queries_than_keys() -> None:
    query, key, value, log_forget = exact_inputs(5, batch=1, n_queries=7, n_keys=30)
    cu_q, cu_k = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 20, 30], dtype=torch.int32)
    out = tra.threshold_relative_attention_varlen(
        *(x[0].transpose(0, 1) for x in (query, key, value, log_forget)), cu_q, cu_k, impl="blockwise"
    )
    for q, k in ((slice(0, 3), slice(0, 20)), (slice(3, 7), slice(20, 30))):
        alone = tra.threshold_relative_attention(
            query[:, :, q], key[:, :, k], value[:, :, k], log_forget[:, :, q], impl="reference"
        )
        torch.testing.assert_close(out[q], alone[0].transpose(0, 1))


@pytest.mark.parametrize("masked", [False, True])
def test_dropout_is_the_reference_s_dropout(masked: bool) -> None:
    inputs = exact_inputs(6, heads=4, kv_heads=2, n_queries=300, n_keys=400, dtype=torch.float64)
    mask = padding("middle", 2, 400) if masked else None
    results = []
    for impl in ("reference", "blockwise"):
        torch.manual_seed(2)
        results.append(run(inputs, torch.ones(2, 4, 300, 16), impl, dropout=0.2, key_mask=mask))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_twice_run_is_bit_identical() -> None:
    inputs, grad_out = exact_inputs(7, n_queries=700), torch.ones(2, 2, 700, 16)
    first, second = (run(inputs, grad_out, "blockwise") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_every_result_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN here, so an element left out would show."""
    for name in ("empty_like", "empty"):
        original = getattr(torch, name)

        def poisoned(*args: object, _original=original, **kwargs: object) -> Tensor:
            result = _original(*args, **kwargs)
            return result.fill_(torch.nan) if result.is_floating_point() else result.fill_(-(2**40))

        monkeypatch.setattr(torch, name, poisoned)
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *a, **k: new_empty(self, *a, **k).fill_(torch.nan))
    inputs = exact_inputs(8, heads=4, kv_heads=2, n_queries=300, n_keys=333)
    for result in run(inputs, torch.ones(2, 4, 300, 16), "blockwise"):
        assert not result.isnan().any()


def test_registered_with_torch_library() -> None:
    inputs = exact_inputs(9, n_queries=40)
    first, last = torch.zeros(2, 40, dtype=torch.int64), torch.arange(40).expand(2, 40).contiguous()
    seed = torch.zeros(1, dtype=torch.int64)
    arguments = (*inputs, first, last, seed, 0.25, 0.0, 0.0, None, 0.0, 2.0**-24)
    torch.library.opcheck(torch.ops.tra.blockwise_forward.default, arguments)


def test_backward_under_autocast_recomputes_the_same_scores() -> None:
    inputs = Inputs(*(torch.randn_like(x) for x in exact_inputs(12, n_queries=300)[:3]), -torch.ones(2, 2, 300))
    inputs = inputs.to(torch.float32)
    grads = []
    for enabled in (False, True):
        out = tra.threshold_relative_attention(*inputs, impl="blockwise")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_compiles_with_symbolic_shapes_and_options(impl: str) -> None:
    attend = torch.compile(tra.threshold_relative_attention, fullgraph=True, dynamic=True)
    for length, scale, threshold in ((40, 0.25, 0.1), (57, 0.5, 0.2), (64, 0.125, -0.1)):
        inputs = exact_inputs(length, n_queries=length)
        options = {"scale": scale, "threshold": threshold, "tolerance": scale / 1e6, "impl": impl}
        expected = tra.threshold_relative_attention(*inputs, **options)
        torch.testing.assert_close(attend(*inputs, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_compiles_as_one_graph(impl: str) -> None:
    inputs = exact_inputs(10, n_queries=70)
    mask = padding("left", 2, 70)

    def attend(*args: Tensor) -> Tensor:
        return tra.threshold_relative_attention(*args, key_mask=mask, impl=impl)

    eager = attend(*inputs)
    compiled = torch.compile(attend, fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled.sum(), inputs), torch.autograd.grad(eager.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_activation_checkpointing_repeats_the_dropout() -> None:
    check_checkpointing_repeats_dropout(exact_inputs(11, n_queries=50), "blockwise")


def test_blocks_cover_more_than_one_block() -> None:
    """The lengths above reach across a block boundary; if blocks grow, so must the tests."""
    assert block_layout.key_block_size(torch.device("cpu")) < max(LENGTHS)
