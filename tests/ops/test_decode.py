"""Decoding in pieces against the float64 definition, and against the forward kernel.

Pieces and phases are made small, so that short inputs have many of both. On a CPU the kernels run in Triton's
interpreter; with a GPU the same tests run there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tra
from benchmarks.decode_mismatches import mismatches
from tests.ops import compare
from tests.ops.compare import Inputs, causal, exact_inputs, padding
from tests.ops.test_fused import DEVICE, DTYPES, LENGTHS, MOSTLY_HALF, WIDTHS
from tests.slow import slow
from tra.bench.judge import errors, plain_attention, rms
from tra.ops import choice
from tra.ops.options import AttentionOptions
from tra.ops.triton import decode, decode_plan, forward, launch
from tra.ops.triton.block_shapes import ForwardTile

pytestmark = pytest.mark.filterwarnings(  # of the interpreter
    "ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"
)
ALL_BOUNDS, MOSTLY_EARLY = (
    pytest.mark.parametrize("score_bound", [32.0, *others], ids=["early", "full"]) for others in ([None], slow(None))
)


SHIPPED = {
    name: getattr(decode_plan, name)
    for name in (
        "PIECE_KEYS",
        "MAX_SHORT_KEYS",
        "LATER_PIECE_KEYS",
        "PHASE_GROWTH",
        "MAX_FIRST_PIECES",
        "MAX_ONE_PIECE_KEYS",
        "MAX_ONE_PIECE_KEYS_FULL",
    )
}


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Phases that end at 128, 512 and 2048 keys, the first in pieces of 32, and a stop at any length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "MAX_FULL_WALK_KEYS", 0)
        patch.setattr(decode_plan, "PIECE_KEYS", 32)
        patch.setattr(decode_plan, "MAX_SHORT_KEYS", 0)
        patch.setattr(decode_plan, "MAX_ONE_PIECE_KEYS", 0)
        patch.setattr(decode_plan, "MAX_ONE_PIECE_KEYS_FULL", 0)
        patch.setattr(decode_plan, "LATER_PIECE_KEYS", 64)
        patch.setattr(decode_plan, "PHASE_GROWTH", 4)
        patch.setattr(decode_plan, "MAX_FIRST_PIECES", 4)
        patch.setattr(decode_plan, "processor_count", lambda _: 8)
        yield


def inputs_here(seed: int, **options: object) -> Inputs:
    return Inputs(*(x.detach() for x in exact_inputs(seed, **options).on(DEVICE)))


def attend(inputs: tuple[Tensor, ...], **options: object) -> Tensor:
    assert choice.decode_fits(*inputs[:3])
    with torch.no_grad():
        return tra.threshold_relative_attention(*inputs, impl="triton", **options)


def exponential_error() -> float:
    """Return the largest error of the exponential that weights come from, in units in the last place.

    A GPU's may be off by two (`ex2.approx`, by the PTX manual); NumPy's, which the interpreter uses, is measured.
    """
    if DEVICE == "cuda":
        return 2.0
    x = np.linspace(-87.0, 0.0, 1_000_000, dtype=np.float32)
    right = np.exp(x.astype(np.float64))
    return float(np.max(np.abs(np.exp(x) - right) / np.spacing(right.astype(np.float32))))


def check(
    inputs: Inputs,
    seen: Tensor,
    plain_options: dict[str, float] | None = None,
    roundings: float = 2.0 if DEVICE == "cuda" else 1.0,
    **options: object,
) -> Tensor:
    """By the rule: twice plain PyTorch's error, or some roundings of a typical value in the precision of the sums.

    One rounding is enough, but on a GPU, whose exponential may be off by two.
    """
    got = attend(inputs, **options)
    with torch.no_grad():
        right = tra.threshold_relative_attention(*inputs.to(torch.float64), impl="reference", **options)
        plainly = plain_attention(*inputs, seen.to(DEVICE), **(plain_options or {}))
    error, allowed = errors(got, plainly, right, roundings * torch.finfo(torch.float32).eps * rms(inputs.value))
    assert error <= allowed, f"error {error:.3g} exceeds {allowed:.3g}"
    return got


@ALL_BOUNDS
@MOSTLY_HALF
@pytest.mark.parametrize("length", [*LENGTHS, 1100])
def test_lengths(length: int, dtype: torch.dtype, score_bound: float | None) -> None:
    inputs = inputs_here(length, heads=1, n_queries=1, n_keys=length, value_width=64, dtype=dtype)
    check(inputs, causal(1, length), score_bound=score_bound)


@MOSTLY_EARLY
@pytest.mark.parametrize("n_queries", [16, *slow(1, 2, 3, 5, 8)])
def test_several_queries_of_grouped_heads(n_queries: int, score_bound: float | None) -> None:
    """Up to 64 rows of a key head, in blocks of 16, 32 and 64."""
    inputs = inputs_here(n_queries, batch=1, heads=8, kv_heads=2, n_queries=n_queries, n_keys=200, value_width=40)
    check(inputs, causal(n_queries, 200), score_bound=score_bound)


@MOSTLY_HALF
@pytest.mark.parametrize("width", WIDTHS)
def test_head_widths(width: int, dtype: torch.dtype) -> None:
    options = {"heads": 2, "n_queries": 2, "n_keys": 70, "width": width, "value_width": 272 - width}
    inputs = inputs_here(width, batch=1, dtype=dtype, **options)
    check(inputs, causal(2, 70), {"scale": 1 / width}, scale=1 / width)


@pytest.mark.parametrize("width", [24, *slow(18, 20, 40, 72)])
def test_rows_that_are_no_multiple_of_16(width: int) -> None:
    """Half precision copies 2, 4 or 8 numbers of a row at once."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    inputs = inputs_here(width, batch=1, heads=2, n_queries=2, n_keys=150, width=width, dtype=dtype)
    check(inputs, causal(2, 150), {"scale": 1 / width}, scale=1 / width)


def test_rows_that_begin_anywhere() -> None:
    """A cache that begins at an odd number, or with a number between its rows, is copied; odd heads aren't taken."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    inputs = inputs_here(0, batch=1, heads=2, n_queries=2, n_keys=150, width=16, dtype=dtype)
    right = attend(inputs)
    for shift, width in ((1, 16), (0, 17)):
        room = torch.zeros(2, shift + 2 * 150 * width, dtype=dtype, device=DEVICE)
        key, value = (
            x[shift:].view(1, 2, 150, width)[..., :16].copy_(y) for x, y in zip(room, inputs[1:3], strict=True)
        )
        assert key.data_ptr() % 16 == 2 * shift
        copied = decode._aligned(key)
        assert copied.is_contiguous()
        assert copied.data_ptr() % 16 == 0
        assert torch.equal(attend(inputs._replace(key=key, value=value)), right)
    odd = inputs_here(0, batch=1, heads=2, n_queries=2, n_keys=150, width=17, dtype=dtype)
    assert not choice.decode_fits(*odd[:3])
    assert choice.decode_fits(*odd.to(torch.float32)[:3])


@MOSTLY_EARLY
@pytest.mark.parametrize("n_queries", [1, *slow(4)])
def test_key_lengths(n_queries: int, score_bound: float | None) -> None:
    """Queries without a single key among them. What stands in slots beyond isn't read."""
    capacity = 400
    lengths = torch.tensor([capacity, 230, 64, 33, 2, 0], dtype=torch.int32)
    inputs = inputs_here(n_queries, batch=6, kv_heads=1, n_queries=n_queries, n_keys=capacity)
    last = lengths[:, None] - n_queries + torch.arange(n_queries)
    seen = (torch.arange(capacity) <= last[..., None])[:, None]
    clean = check(inputs, seen, score_bound=score_bound, key_lengths=lengths.to(DEVICE))
    beyond = (torch.arange(capacity) >= lengths[:, None])[:, None, :, None].to(DEVICE)
    key, value = (x.masked_fill(beyond, torch.nan) for x in (inputs.key, inputs.value))
    lame = inputs._replace(key=key, value=value)
    assert torch.equal(attend(lame, score_bound=score_bound, key_lengths=lengths.to(DEVICE)), clean)
    assert not clean[-1].any()


@MOSTLY_EARLY
@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("length", [63, *slow(5, 257)])
def test_padding(length: int, side: str, score_bound: float | None) -> None:
    """In the kernel: no copy of the keys without it, and what stands there isn't read."""
    mask = padding(side, 2, length)
    inputs = inputs_here(length, kv_heads=1, n_queries=3, n_keys=length)
    hidden = ~mask[:, None, :, None].to(DEVICE)
    key, value = (x.masked_fill(hidden, torch.nan) for x in (inputs.key, inputs.value))
    options = {"key_mask": mask.to(DEVICE), "score_bound": score_bound}
    clean = check(inputs, causal(3, length) & mask[:, None, None], **options)
    assert torch.equal(attend(inputs._replace(key=key, value=value), **options), clean)


def test_a_mask_of_any_layout_and_lengths_together() -> None:
    mask = padding("left", 2, 200)
    lengths = torch.tensor([180, 90], dtype=torch.int32)
    seen = (torch.arange(200) <= (lengths[:, None] - 4 + torch.arange(4))[..., None]) & mask[:, None]
    inputs = inputs_here(2, kv_heads=1, n_queries=4, n_keys=200)
    apart = mask.T.contiguous().T.to(DEVICE)
    assert not apart.is_contiguous()
    check(inputs, seen[:, None], key_mask=apart, key_lengths=lengths.to(DEVICE))
    check(inputs, causal(4, 200) & mask[:1, None, None], key_mask=mask[:1].to(DEVICE).expand(2, -1))


def test_packed_sequences() -> None:
    """Ranges that begin in the middle of the keys."""
    inputs = Inputs(
        *(x[0].transpose(0, 1) for x in inputs_here(4, batch=1, heads=4, kv_heads=2, n_queries=5, n_keys=300))
    )
    queries, keys = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 1, 3, 5], [0, 5, 107, 300]))
    out = tra.threshold_relative_attention_varlen(*inputs, queries, keys, impl="triton", score_bound=32.0)
    double = [x.double() for x in inputs]
    right = tra.threshold_relative_attention_varlen(*double, queries, keys, impl="reference")
    seen = torch.zeros(1, 1, 5, 300, dtype=torch.bool)
    for begin, end, first, last in ((0, 1, 0, 5), (1, 3, 5, 107), (3, 5, 107, 300)):
        seen[..., begin:end, first:last] = causal(end - begin, last - first)
    plainly = plain_attention(*(x.transpose(0, 1)[None] for x in inputs), seen.to(DEVICE))[0].transpose(0, 1)
    error, allowed = errors(out, plainly, right, torch.finfo(torch.float32).eps * rms(inputs.value))
    assert error <= allowed


@pytest.mark.parametrize("threshold", [0.75, math.inf, *slow(0.3, -0.7, -0.75, -math.inf)])
@pytest.mark.parametrize("scale", [0.5, -0.5, *slow(0.3)])
def test_threshold_and_scale(threshold: float, scale: float) -> None:
    """Scores that fall on the threshold among them."""
    options = {"threshold": threshold, "scale": scale}
    check(inputs_here(1, batch=1, n_queries=4, n_keys=111), causal(4, 111), options, **options)


@MOSTLY_HALF
@MOSTLY_EARLY
@pytest.mark.parametrize("gate", [-0.1, 0.0, *slow(-1000.0, -20.0, -3.0, -1e-4)])
def test_gates(gate: float, score_bound: float | None, dtype: torch.dtype) -> None:
    query, key, value, log_forget = inputs_here(2, batch=1, n_queries=8, n_keys=300, dtype=dtype)
    inputs = Inputs(query, key, value, torch.full_like(log_forget, gate))
    check(inputs, causal(8, 300), {"scale": 0.125}, scale=0.125, score_bound=score_bound)


@DTYPES
def test_a_steep_gate_with_dropped_keys_nearby(dtype: torch.dtype) -> None:
    """The nearest kept key takes all, though it is pieces away."""
    query, key, value, log_forget = inputs_here(2, batch=1, n_queries=1, n_keys=300, dtype=dtype)
    key[:, :, 40:] = 0.0
    inputs = Inputs(query, key, value, torch.full_like(log_forget, -1000.0))
    check(inputs, causal(1, 300), score_bound=32.0)


LARGEST = {torch.bfloat16: math.log(2.0**-24 / torch.finfo(torch.float32).tiny) / 2}
"""The largest bound at which weights need no running reference: exp(-2 bound), and 2⁻²⁴ of it, is a normal number."""
LARGEST[torch.float32] = LARGEST[torch.bfloat16] - math.log(2.0**30) / 2
"""There sums of 2³⁰ values don't overflow."""


def test_whose_reference_is_fixed() -> None:
    layers = [math.sqrt(width) * (1 + 2.0**-7) for width in (16, 64, 128, 256)]
    for dtype, largest in LARGEST.items():
        assert all(decode._reference_is_fixed(dtype, bound) for bound in (0.0, *layers, largest * (1 - 1e-9)))
        assert not any(decode._reference_is_fixed(dtype, bound) for bound in (None, largest * (1 + 1e-9), 1e30))
        assert torch.finfo(dtype).tiny == torch.finfo(torch.float32).tiny
    assert not any(decode._reference_is_fixed(torch.float16, bound) for bound in (None, 0.0, 1.0, 8.0))


def at_the_bound(bound: float, gate: float, n_keys: int = 300) -> Inputs:
    """Keys that are the query or its opposite, so that scores are `bound` or its negative; the newest are weak."""
    signs = torch.randint(2, (1, 1, n_keys, 1), generator=torch.Generator().manual_seed(n_keys)) * 2.0 - 1
    signs[:, :, -40:] = -1.0
    query = torch.ones(1, 1, 1, 16) * bound / 4
    value = torch.randn(1, 1, n_keys, 16, generator=torch.Generator().manual_seed(3))
    key = signs * torch.ones(16)
    return Inputs(*(x.to(DEVICE) for x in (query, key, value, torch.full((1, 1, 1), gate))))


@pytest.mark.parametrize("tolerance", [2.0**-24, *slow(0.0)])
@pytest.mark.parametrize("gate", [-0.7, *slow(-300.0, -2.5, -1e-3, 0.0)])
@pytest.mark.parametrize("bound", [*(LARGEST[torch.float32] * x for x in (1 - 1e-6, 1 + 1e-6)), *slow(8.0, 60.0)])
def test_scores_at_the_bound(bound: float, gate: float, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kept key is as weak as can be, and older ones as strong: nothing may vanish that counts."""
    inputs = at_the_bound(bound, gate)
    options = {"threshold": -math.inf, "score_bound": bound, "tolerance": tolerance}
    # Weights of plain PyTorch are nearly exact here, so the exponential alone says how far off ours may be.
    check(inputs, causal(1, 300), {"threshold": -math.inf}, roundings=1 + exponential_error(), **options)
    _, found = pieces_of(inputs, monkeypatch, **options)
    read = found[0, found[0, :, 2] > 0]
    assert read[:, 1].all()
    assert bool((read[:, 0] == gate).all()) == (bound < LARGEST[torch.float32])


@pytest.mark.parametrize("n_keys", [20, 300])  # in one piece, and in several
@pytest.mark.parametrize("score_bound", [None, 8.0])
def test_values_near_the_largest_float(score_bound: float | None, n_keys: int) -> None:
    """No sum on the way overflows, though weights may be 2¹¹; nor do small values vanish."""
    inputs = inputs_here(6, batch=1, n_queries=2, n_keys=n_keys)
    signs = inputs.value.sign()
    options: dict[str, object] = {"score_bound": score_bound}
    exact = tra.threshold_relative_attention(*inputs._replace(value=signs), impl="reference")
    for scale in (3e38, 1e-30):
        out = attend(inputs._replace(value=signs * scale), **options)
        torch.testing.assert_close(out.double() / scale, exact.double(), atol=2e-6, rtol=1e-5)


@MOSTLY_HALF
@ALL_BOUNDS
def test_the_steepest_gate_there_is(score_bound: float | None, dtype: torch.dtype) -> None:
    """Its multiples overflow, in powers of two it does so itself; the nearest kept key is alone."""
    query, key, value, log_forget = inputs_here(2, batch=1, n_queries=1, n_keys=300, dtype=dtype)
    inputs = Inputs(query, key, value, torch.full_like(log_forget, -3e38))
    check(inputs, causal(1, 300), score_bound=score_bound)


@pytest.mark.parametrize("gate", [-0.7, *slow(-300.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_pieces_that_keep_nothing(gate: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 0 says so, and nothing else does: not even a piece whose only key is as weak as can be."""
    bound = 8.0 if dtype == torch.float16 else LARGEST[dtype] * (1 - 1e-6)
    query, key, value, log_forget = at_the_bound(bound, gate)
    inputs = Inputs(query.to(dtype), -key.abs().to(dtype), value.to(dtype), log_forget)
    mask = (torch.arange(300, device=DEVICE) % 128 == 5)[None]  # blocks have up to 64 keys
    options = {"threshold": -math.inf, "score_bound": bound, "tolerance": 0.0, "key_mask": mask}
    check(inputs, causal(1, 300) & mask[:, None, None].cpu(), {"threshold": -math.inf}, **options)
    _, found = pieces_of(inputs, monkeypatch, **options)
    assert torch.equal(found[..., 1] == 0, found[..., 2] == 0)
    assert {0.0, 1.0} == set(found[..., 2].flatten().tolist())


@ALL_BOUNDS
def test_rows_that_keep_nothing(score_bound: float | None) -> None:
    inputs = inputs_here(3, batch=1, heads=4, kv_heads=2, n_queries=4, n_keys=300)
    inputs.query[:, :, ::2] = 0.0
    inputs.query[:, 1] = 0.0
    out = check(inputs, causal(4, 300), score_bound=score_bound)
    assert not out[:, :, ::2].any()
    assert not out[:, 1].any()
    assert out[:, 0, 1].any()


@MOSTLY_HALF
def test_any_layout_in_memory(dtype: torch.dtype) -> None:
    """Columns apart, heads beside each other, a batch that is one tensor twice, a slice of a longer cache."""
    query, key, value, log_forget = inputs_here(4, heads=4, kv_heads=2, n_queries=3, n_keys=100, dtype=dtype)
    plainly = attend((query, key, value, log_forget))
    longer = F.pad(key, (0, 0, 0, 60), value=torch.nan)
    laid_out = (
        query.mT.contiguous().mT,
        longer[:, :, :100],
        value.transpose(1, 2).contiguous().transpose(1, 2),
        log_forget.transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert torch.equal(attend(laid_out), plainly)
    once = tuple(x[:1].expand_as(x) for x in laid_out)
    assert torch.equal(attend(once), plainly[:1].expand_as(plainly))
    beside = query.transpose(1, 2).contiguous().transpose(1, 2)
    out = attend((beside, key, value, log_forget))
    assert out.stride() == beside.stride()
    assert torch.equal(out, plainly)


def test_which_calls_come_here(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("decode", "fused_forward"):
        original = getattr(torch.ops.tra, name)
        monkeypatch.setattr(
            torch.ops.tra, name, lambda *args, _name=name, _original=original: called.append(_name) or _original(*args)
        )
    for options, grad, dropout, expected in (
        ({"n_queries": 1}, False, 0.0, "decode"),
        ({"n_queries": 16}, False, 0.0, "decode"),
        ({"n_queries": 17}, False, 0.0, "fused_forward"),
        ({"n_queries": 16, "heads": 4, "kv_heads": 1}, False, 0.0, "decode"),
        ({"n_queries": 13, "heads": 5, "kv_heads": 1}, False, 0.0, "fused_forward"),
        ({"n_queries": 1}, True, 0.0, "fused_forward"),
        ({"n_queries": 1}, False, 0.1, "fused_forward"),
    ):
        inputs = exact_inputs(0, n_keys=40, **options).on(DEVICE)
        with torch.set_grad_enabled(grad):
            tra.threshold_relative_attention(*inputs, dropout=dropout, impl="triton")
        assert called.pop() == expected
    assert not called


def test_a_mask_costs_no_copy_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the keys were copied")

    monkeypatch.setattr(forward, "without_padding", refuse)
    attend(inputs_here(0, n_queries=1, n_keys=40), key_mask=padding("left", 2, 40).to(DEVICE))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("heads", [1, 8, 256])
@pytest.mark.parametrize("n_blocks", [1, 4, 63, 64, 65, 1024, 4096, 2**20])
def test_phases_cover_the_keys(n_blocks: int, heads: int, early: bool) -> None:
    """As the kernel cuts them, for any length that a cache of this capacity may have."""
    plan = decode_plan.phases(n_blocks, heads, 64, 132, early, 256)
    for length in {1, n_blocks // 3, n_blocks // 2, n_blocks - 1, n_blocks} - {0}:
        end = length  # blocks from here on have been taken
        for phase in plan:
            high = length - 1 - phase.start
            low = max(0, high - phase.blocks + 1)
            each = max(-(-max(high - low + 1, 0) // phase.pieces), phase.min_blocks)
            for piece in range(phase.pieces):
                newest = high - piece * each
                oldest = max(low, newest - each + 1)
                if newest >= oldest:
                    assert newest == end - 1
                    end = oldest
        assert end == 0
    assert sum(phase.pieces for phase in plan) <= 1024
    if not early:
        assert len(plan) == 1


def test_plans_of_short_and_long_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the constants as shipped: a processor's worth of heads, few heads, and long full walks."""
    for name, value in SHIPPED.items():
        monkeypatch.setattr(decode_plan, name, value)

    def pieces(n_keys: int, heads: int, early: bool, piece: int | None = None) -> list[int]:
        return [phase.pieces for phase in decode_plan.phases(-(-n_keys // 64), heads, 64, 132, early, piece)]

    assert pieces(2048, 132, True) == pieces(1024, 132, False) == [1]
    assert len(pieces(2048 + 64, 132, True)) == 2
    assert pieces(1024 + 64, 132, False) != [1]
    assert len(pieces(2048, 131, True)) == 2
    assert pieces(1024, 131, False) != [1]
    for early in (False, True):
        assert pieces(1024, 8, early) == [16]
        assert pieces(1, 8, early) == [1]
        assert pieces(64 * 132, 1, early) == [128]
        assert pieces(1024, 8, early, 256)[0] == 4
        assert pieces(1024, 132, early, 256)[0] > 1
    assert pieces(1024 + 64, 8, False) == [9]
    assert pieces(2**20, 8, False) == [50]
    assert pieces(50 * 2048, 8, False) == [50]
    assert pieces(50 * 2048 - 64, 8, False) == [128]
    assert pieces(65536, 1000, False) == [1]


def test_short_caches_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single piece writes the output itself."""
    from tra.ops.triton import decode_kernels

    monkeypatch.setattr(decode_kernels, "merge_kernel", None)
    inputs = inputs_here(1, n_queries=1, n_keys=30)
    check(inputs, causal(1, 30))
    with pytest.raises(TypeError, match="NoneType"):
        attend(inputs_here(1, n_queries=1, n_keys=70))


@pytest.mark.slow
def test_every_result_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN here, so an element left out, or read before it is written, would show."""
    inputs = inputs_here(8, batch=1, heads=4, kv_heads=2, n_queries=3, n_keys=600)
    inputs.log_forget[:, :2] = -3.0  # some leave at once
    expected = [attend(inputs, score_bound=bound) for bound in (None, 32.0)]
    original, new_empty = torch.empty, Tensor.new_empty
    poisoned = []

    def empty(*args: object, **kwargs: object) -> Tensor:
        poisoned.append(True)
        return original(*args, **kwargs).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))
    for bound, right in zip((None, 32.0), expected, strict=True):
        assert torch.equal(attend(inputs, score_bound=bound), right)
    assert len(poisoned) == 4


def test_twice_run_is_bit_identical() -> None:
    inputs = inputs_here(7, batch=1, heads=4, kv_heads=2, n_queries=3, n_keys=300)
    assert torch.equal(attend(inputs, score_bound=32.0), attend(inputs, score_bound=32.0))


@pytest.mark.parametrize("n_queries", [5, *slow(1)])
@pytest.mark.parametrize("kind", ["growing", "lengths", "mask"])
def test_a_stop_reads_no_further(n_queries: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With δ = -3 and scores up to 16 the rest weighs less than 2⁻²⁴ after some 12 kept keys.

    All keys are one piece here. What is older is NaN, in keys and in values, and would show if it were read.
    """
    monkeypatch.setattr(decode_plan, "PIECE_KEYS", 1024)
    length, capacity = 600, 600 if kind == "growing" else 800
    inputs = inputs_here(5, kv_heads=1, n_queries=n_queries, n_keys=capacity)
    inputs.log_forget.fill_(-3.0)
    options: dict[str, object] = {"score_bound": 16.0}
    newest = length
    if kind == "lengths":
        options["key_lengths"] = torch.full((2,), length, dtype=torch.int32, device=DEVICE)
    if kind == "mask":
        newest = capacity - 40
        options["key_mask"] = (torch.arange(capacity, device=DEVICE) < newest).expand(2, -1)
    clean = attend(inputs, **options)
    for which in ("key", "value"):
        getattr(inputs, which)[:, :, : newest - 160] = torch.nan
    assert torch.equal(attend(inputs, **options), clean)
    assert attend(inputs, **(options | {"tolerance": 0.0})).isnan().all()


def test_the_merge_passes_over_what_is_older_than_a_stop() -> None:
    """Pieces of the first phase don't wait for each other: the older ones have read NaN here."""
    inputs = inputs_here(5, batch=1, n_queries=2, n_keys=300)
    inputs.log_forget.fill_(-3.0)
    clean = attend(inputs, score_bound=16.0)
    inputs.key[:, :, :256] = torch.nan
    assert torch.equal(attend(inputs, score_bound=16.0), clean)


def pieces_of(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, **options: object
) -> tuple[list[decode_plan.Phase], Tensor]:
    """Phases, and of every piece `[B Hkv, pieces, 4]` what it leaves for the first row: reference, sum, count, stop."""
    made: list[Tensor] = []
    plans: list[list[decode_plan.Phase]] = []
    empty, phases = torch.empty, decode_plan.phases
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: made.append(empty(*args, **kwargs)) or made[-1])
        patch.setattr(decode_plan, "phases", lambda *args: plans.append(phases(*args)) or plans[-1])
        attend(inputs, **options)
    stats, plan = made[-1], plans[-1]
    heads, rows = inputs.key.shape[0] * inputs.key.shape[1], inputs.query.shape[1:3].numel() // inputs.key.shape[1]
    return plan, stats.view(4, heads, sum(phase.pieces for phase in plan), rows)[..., 0].permute(1, 2, 0)


def test_few_keys_are_cut_finer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_plan, "PIECE_KEYS", 64)
    monkeypatch.setattr(decode_plan, "MAX_SHORT_KEYS", 320)
    for length, pieces in ((320, 10), (321, 6)):
        plan, found = pieces_of(inputs_here(5, batch=1, n_queries=1, n_keys=length), monkeypatch)
        assert [phase.pieces for phase in plan] == [pieces]
        assert found[..., 2].all()


def test_later_phases_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head by head: one forgets, the other doesn't, and reads all."""
    inputs = inputs_here(5, batch=1, n_queries=1, n_keys=1100)
    inputs.log_forget[:, 0], inputs.log_forget[:, 1] = -3.0, 0.0
    plan, found = pieces_of(inputs, monkeypatch, score_bound=16.0)
    assert len(plan) == 3
    forgetful, remembering = found[:, plan[0].pieces :]
    assert not forgetful[:, 1:3].any()
    assert forgetful[:, 3].all()
    assert remembering[:, 1:3].any()
    _, full = pieces_of(inputs, monkeypatch, score_bound=16.0, tolerance=0.0)
    assert float(full[0, :, 2].sum()) > float(found[0, :, 2].sum())
    assert float(full[1, :, 2].sum()) == float(found[1, :, 2].sum())


def test_a_later_phase_asks_the_former(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece of the first phase can stop by itself: each keeps too few keys. Together they keep enough."""
    query, key = torch.ones(1, 1, 1, 16, device=DEVICE), torch.full((1, 1, 600, 16), 0.25, device=DEVICE)
    gate = torch.full((1, 1, 1), -0.2, device=DEVICE)
    plan, found = pieces_of(Inputs(query, key, key, gate), monkeypatch, score_bound=1.0)
    first, later = found[0].tensor_split([plan[0].pieces])
    assert not first[:, 3].any()
    assert first[:, 2].all()
    assert later[:, 3].all()
    assert not later[:, 2].any()
    _, found = pieces_of(Inputs(query, key, key, gate / 40), monkeypatch, score_bound=1.0)
    assert float(found[0, :, 2].sum()) == 600


def test_a_null_row_reads_on() -> None:
    """And holds the rows beside it, not those of other heads."""
    inputs = inputs_here(5, batch=1, heads=4, kv_heads=2, n_queries=2, n_keys=600)
    inputs.log_forget.fill_(-3.0)
    inputs.query[:, 0, 0] = 0.0
    inputs.key[:, :, 5] = torch.nan
    out = attend(inputs, score_bound=16.0)
    assert out[:, :2].isnan().all()
    assert not out[:, 2:].isnan().any()


@pytest.mark.parametrize("content", ["dense", "sparse", "null rows", "far and strong"])
@pytest.mark.parametrize("gate", [-0.69, *slow(-20.0, -3.0, -0.13, -0.018, -1e-6, 0.0)])
@pytest.mark.parametrize("tolerance", [2.0**-24, *slow(1e-2)])
def test_dropped_weight_is_within_tolerance(
    content: str, gate: float, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unit vectors as values: the output is the weights, up to what was left out, by which the others are larger."""
    monkeypatch.setattr(decode_plan, "processor_count", lambda _: 4)  # fewer than blocks, which come in phases then
    length = 256
    query, key = (x.to(DEVICE) for x in compare.contents(content, 1, length, heads=1, kept=0.05))
    query = query[:, :, -4:]
    value = torch.eye(length, device=DEVICE)[None, None]
    log_forget = torch.full((1, 1, 4), gate, device=DEVICE) * torch.tensor([1.0, 0.5, 0.8, 1.4], device=DEVICE)
    highest = float((query.double() @ key.double().mT).abs().max()) / 4
    got = attend((query, key, value, log_forget), score_bound=highest, tolerance=tolerance)
    exact = tra.threshold_relative_attention(*(x.double() for x in (query, key, value, log_forget)), impl="reference")
    # Weights that underflow in float32 are 0 whether read or not: they can't be told apart, and don't matter.
    assert float(torch.where(got == 0, exact, 0.0).sum(-1).max()) <= tolerance


def test_nan_shows() -> None:
    """In a query or a gate: in its row. In a key or a value: in every row that sees it, where no bound is promised."""
    clean = inputs_here(5, heads=2, n_queries=3, n_keys=100)
    for which in ("query", "log_forget"):
        lame = clean._replace(**{which: getattr(clean, which).clone()})
        getattr(lame, which)[0, 0, 1] = torch.nan
        for options in ({}, {"score_bound": 32.0}):
            out = attend(lame, **options)
            assert out[0, 0, 1].isnan().all()
            out[0, 0, 1] = 0.0
            assert not out.isnan().any()
    for which in ("key", "value"):
        lame = clean._replace(**{which: getattr(clean, which).clone()})
        getattr(lame, which)[1, 1, 98] = torch.nan  # which the first query doesn't see
        lame.log_forget.fill_(-1e-3)
        out = attend(lame)
        assert out[1, 1, 1:].isnan().all()
        assert not out[0].isnan().any()
        assert not out[1, 0].isnan().any()
    lame = clean._replace(key=clean.key.clone())
    lame.key[1, 1, 3] = torch.nan
    for options in ({}, {"score_bound": 32.0, "tolerance": 0.0}):
        assert attend(lame, **options)[1, 1].isnan().all()


@MOSTLY_HALF
@pytest.mark.parametrize("masked", [True, *slow(False)])
def test_keeps_the_keys_that_the_forward_kernel_keeps(dtype: torch.dtype, masked: bool) -> None:
    """Unit vectors as values: an output is a row of weights, and 0 where a key is dropped. Scores are exact."""
    inputs = inputs_here(3, batch=2, kv_heads=1, n_queries=8, n_keys=128, dtype=dtype)
    value = torch.eye(128, device=DEVICE, dtype=dtype).expand(2, 1, -1, -1)
    query, key = inputs[:2]
    key = key.masked_fill(~padding("left", 2, 128)[:, None, :, None].to(DEVICE), 0.0) if masked else key
    log_forget = torch.zeros_like(inputs.log_forget)
    for threshold in (0.0, 0.5 * 0.0625, -0.25 * 0.0625):
        out = attend((query, key, value, log_forget), scale=0.0625, threshold=threshold)
        forward = torch.ops.tra.fused_forward(
            query, key, value, log_forget, None, None, None, 0.0625, threshold, 0.0, None, 0.0, 0.0, False
        )[0]
        assert torch.equal(out > 0, forward > 0)
        assert 0.1 < float((out > 0).float().mean()) < 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_random_scores_keep_the_keys_that_the_forward_kernel_keeps(width: int, rows: int, dtype: torch.dtype) -> None:
    """Scores are whatever rounding makes of them, and where they cancel nothing but rounding."""
    for content in ("random", "cancelling"):
        assert mismatches(rows, width=width, dtype=dtype, content=content) == 0


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.float32)], ids=str)
def test_mismatches_are_counted(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on scores that are exact, and with a decode that drops the key of the highest weight."""
    options = {"width": 16, "dtype": dtype, "draws": 1, "heads": 1, "length": 32, "content": "exact", "device": DEVICE}
    assert mismatches(16, **options) == 0
    original = decode.decode_attention

    def forgetful(*args: Tensor, **kwargs: object) -> Tensor:
        out = original(*args, **kwargs)
        return out.scatter(-1, out.argmax(-1, keepdim=True), 0.0)

    monkeypatch.setattr(decode, "decode_attention", forgetful)
    assert mismatches(16, **options) > 16


shapes = st.tuples(st.integers(1, 3), st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1)]), st.integers(1, 8))


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**20),
    shape=shapes,
    extra=st.integers(0, 500),
    piece=st.sampled_from([32, 64, 96, 160]),
    gate=st.sampled_from([0.0, -1e-3, -0.05, -0.7, -20.0]),
    masked=st.booleans(),
    early=st.booleans(),
)
def test_pieces_merge_to_the_same_as_one(
    seed: int, shape: tuple[int, tuple[int, int], int], extra: int, piece: int, gate: float, masked: bool, early: bool
) -> None:
    """By the rule, with twice the error of a single piece allowed where that is more."""
    batch, (heads, kv_heads), n_queries = shape
    sizes = {"heads": heads, "kv_heads": kv_heads, "n_queries": n_queries, "n_keys": n_queries + extra}
    inputs = inputs_here(seed, batch=batch, value_width=64, **sizes)
    inputs.log_forget.mul_(-gate)
    mask = None
    seen = causal(n_queries, n_queries + extra).to(DEVICE)
    if masked:
        mask = torch.rand(batch, n_queries + extra, generator=torch.Generator().manual_seed(seed)).to(DEVICE) < 0.7
        seen = seen & mask[:, None, None]
    options = AttentionOptions(0.25, score_bound=16.0, tolerance=2.0**-24 if early else 0.0)
    cut = decode.decode_attention(*inputs, None, None, mask, options, piece=piece)
    whole = decode.decode_attention(*inputs, None, None, mask, replace(options, tolerance=0.0), piece=2**20)
    with torch.no_grad():
        right = tra.threshold_relative_attention(*inputs.to(torch.float64), key_mask=mask, impl="reference")
        plainly = plain_attention(*inputs, seen)
    error, single, usual = (rms(x.double() - right) for x in (cut, whole, plainly))
    assert error <= max(2 * single, 2 * usual, torch.finfo(torch.float32).eps * rms(inputs.value.double()))


def test_registered_with_torch_library() -> None:
    inputs = inputs_here(9, kv_heads=1, n_queries=2, n_keys=50)
    first, last = (x.to(DEVICE, torch.int32) for x in (torch.zeros(2, 2), torch.tensor([[48, 49], [20, 21]])))
    mask = padding("left", 2, 50).to(DEVICE)
    for rest in ((None, None, None), (first, last, None), (first, last, mask)):
        torch.library.opcheck(torch.ops.tra.decode.default, (*inputs, *rest, 0.25, 0.0, 0.0, 16.0, 2.0**-24))


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    """A static cache that fills up: one graph for all lengths."""
    from torch._dynamo.testing import CompileCounterWithBackend

    inputs = inputs_here(10, heads=4, kv_heads=2, n_queries=1, n_keys=400)
    counter = CompileCounterWithBackend("inductor")

    def step(*args: Tensor) -> Tensor:
        *given, key_lengths = args
        return tra.threshold_relative_attention(*given, key_lengths=key_lengths, score_bound=16.0, impl="triton") * 2

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    with torch.no_grad():
        for length in (1, 2, 100, 399, 400):
            lengths = torch.tensor([length, length // 2], dtype=torch.int32, device=DEVICE)
            assert torch.equal(compiled(*inputs, lengths), step(*inputs, lengths))
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_captured_in_a_cuda_graph() -> None:
    """Lengths change under the graph, as they do while a cache fills up."""
    inputs = inputs_here(13, heads=8, kv_heads=2, n_queries=1, n_keys=3000, width=64, dtype=torch.bfloat16)
    lengths = torch.tensor([3000, 1200], dtype=torch.int32, device=DEVICE)
    options = {"key_lengths": lengths, "score_bound": 64.0}
    attend(inputs, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(inputs, **options)
    for new in ([3000, 1200], [1, 0], [70, 2999]):
        lengths.copy_(torch.tensor(new))
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, attend(inputs, **options))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "width", "tile"),
    [(size, width, tile) for (size, width), tiles in decode_plan.TILES.items() for tile in tiles],
)
def test_every_tile(size: int, width: int, tile: ForwardTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that another GPU would take."""
    monkeypatch.setattr(decode_plan, "decode_tiles", lambda *_: (tile,))
    dtype = torch.bfloat16 if size == 2 else torch.float32
    inputs = inputs_here(1, heads=8, kv_heads=2, n_queries=3, n_keys=900, width=width, dtype=dtype)
    monkeypatch.setattr("tra.ops.triton.block_shapes._chosen", {})
    check(inputs, causal(3, 900), {"scale": 1 / width}, scale=1 / width, score_bound=4.0)
