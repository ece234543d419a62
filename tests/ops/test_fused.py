"""The Triton kernels against the float64 definition, outputs and every gradient.

On a CPU they run in Triton's interpreter, which has no products of bfloat16; with a GPU the same tests run there.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tra
from tests.ops import compare
from tests.ops.compare import Inputs, causal, check_checkpointing_repeats_dropout, exact_inputs, padding, run
from tests.slow import slow
from tra.ops import attention_map
from tra.ops.raw_threshold import raw_threshold
from tra.ops.triton import backward, block_shapes, forward, launch
from tra.ops.triton.launch import heads_sorted_together

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LENGTHS = (63, *slow(1, 111, 257))
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
DTYPES, MOSTLY_HALF = (
    pytest.mark.parametrize("dtype", [torch.float16, *others, BFLOAT16], ids=lambda dtype: str(dtype)[6:])
    for others in ([torch.float32], slow(torch.float32))
)
WIDTHS = (80, *slow(16, 24, 64, 128, 192, 256))
pytestmark = pytest.mark.filterwarnings(  # of the interpreter
    "ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"
)


@pytest.fixture(autouse=True)
def stops_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are short; the early stop is what most of them are about."""
    monkeypatch.setattr(launch, "MAX_FULL_WALK_KEYS", 0)


def inputs_here(*args: int, **options: object) -> Inputs:
    return exact_inputs(*args, **options).on(DEVICE)


def check(
    inputs: Inputs,
    seen: Tensor,
    plain_options: dict[str, float] | None = None,
    floor: torch.dtype | None = None,
    **options: object,
) -> None:
    compare.check(inputs, seen, "triton", plain_options, floor, **options)


@MOSTLY_HALF
@pytest.mark.parametrize("score_bound", [None, 8.0], ids=["online", "fixed"])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, score_bound: float | None, dtype: torch.dtype) -> None:
    """With a promised bound near enough there is no running maximum.

    A single key has a weight of exactly 1, and plain PyTorch no error. With a fixed reference the weight is a rounded
    number over itself, and backward's one rounding off, so there one rounding of the dtype is allowed.
    """
    inputs = inputs_here(length, n_queries=length, dtype=dtype)
    floor = dtype if length == 1 and score_bound is not None else None
    check(inputs, causal(length, length), {"scale": 0.125}, floor, scale=0.125, score_bound=score_bound)


@pytest.mark.slow
@DTYPES
def test_a_thousand(dtype: torch.dtype) -> None:
    inputs = inputs_here(5, batch=1, heads=1, n_queries=1000, dtype=dtype)
    check(inputs, causal(1000, 1000), {"scale": 0.125}, scale=0.125, score_bound=8.0)


@MOSTLY_HALF
@pytest.mark.parametrize("width", WIDTHS)
def test_head_widths(width: int, dtype: torch.dtype) -> None:
    inputs = inputs_here(width, batch=1, n_queries=70, width=width, dtype=dtype)
    check(inputs, causal(70, 70))


@pytest.mark.parametrize("width", [64, 256])
def test_a_fixed_reference_in_float16_keeps_small_weights(width: int) -> None:
    """Every score far below the bound: as it stands, most weights would be too small for float16."""
    inputs = inputs_here(1, batch=1, n_queries=70, width=width, dtype=torch.float16)
    highest = float((inputs.query.detach().double() @ inputs.key.detach().double().mT).abs().max()) / width
    assert highest < math.sqrt(width) / 2
    options = {"scale": 1 / width}
    check(inputs, causal(70, 70), options, **options, score_bound=math.sqrt(width))


@pytest.mark.parametrize("length", LENGTHS)
def test_grouped_heads_other_value_width_and_fewer_queries(length: int) -> None:
    batch = 8 if length == 1 else 1  # a mean over six gates would be luck
    inputs = inputs_here(
        length, batch=batch, heads=6, kv_heads=2, n_queries=length, n_keys=length + 130, value_width=40
    )
    check(inputs, causal(length, length + 130))


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("length", LENGTHS)
def test_padding(length: int, side: str) -> None:
    mask = padding(side, 2, length)
    inputs = inputs_here(length, n_queries=length, heads=1)
    check(inputs, causal(length, length) & mask[:, None, None], key_mask=mask.to(DEVICE))


@pytest.mark.parametrize("length", LENGTHS)
def test_key_lengths(length: int) -> None:
    capacity = length + 140
    lengths = torch.tensor([capacity, length // 2 + 1], dtype=torch.int32)
    last = lengths[:, None] - length + torch.arange(length)
    check(
        inputs_here(length, n_queries=length, n_keys=capacity, heads=1),
        (torch.arange(capacity) <= last[..., None])[:, None],
        key_lengths=lengths.to(DEVICE),
    )


def test_key_mask_and_key_lengths_together() -> None:
    mask = padding("left", 2, 200)
    lengths = torch.tensor([180, 90], dtype=torch.int32)
    seen = (torch.arange(200) <= (lengths[:, None] - 50 + torch.arange(50))[..., None]) & mask[:, None]
    inputs = inputs_here(2, n_queries=50, n_keys=200)
    check(inputs, seen[:, None], key_mask=mask.to(DEVICE), key_lengths=lengths.to(DEVICE))


@pytest.mark.parametrize("threshold", [0.75, *slow(0.3, -0.7, -0.75)])
@pytest.mark.parametrize("scale", [0.5, -0.5, *slow(0.3)])
def test_threshold_and_scale(threshold: float, scale: float) -> None:
    """Scores that fall on the threshold among them."""
    options = {"threshold": threshold, "scale": scale}
    check(inputs_here(1, batch=1, n_queries=111), causal(111, 111), options, **options)


@pytest.mark.parametrize("scale", [0.125, 0.3, 1e-3, 7.0, 0.0])
@pytest.mark.parametrize("threshold", [0.0, 0.3, -0.3, 1e-30, math.inf, -math.inf])
def test_the_cut_decides_as_the_definition(scale: float, threshold: float) -> None:
    near = torch.tensor(threshold / scale if scale else 1.0).nan_to_num()
    x = torch.cat([near + torch.arange(-50, 51) * near.abs().clamp(min=1e-38) * 2**-24, torch.tensor([-1.0, 0.0, 1.0])])
    assert torch.equal(x <= raw_threshold(scale, threshold), x * scale <= threshold)


@pytest.mark.parametrize("gate", [-0.1, *slow(-20.0, -3.0, -1e-4, 0.0)])
@pytest.mark.parametrize("score_bound", [8.0, *slow(None)])
def test_gates(gate: float, score_bound: float | None) -> None:
    query, key, value, _ = inputs_here(2, batch=1, n_queries=150, dtype=torch.float16)
    inputs = Inputs(query, key, value, torch.full((1, 2, 150), gate, device=DEVICE, requires_grad=True))
    check(inputs, causal(150, 150), {"scale": 0.125}, scale=0.125, score_bound=score_bound)


@pytest.mark.parametrize("score_bound", [8.0, *slow(None, 2.0)])
@pytest.mark.parametrize("gate", [-1000.0, *slow(-20.0, -100.0)])
def test_a_steep_gate_with_dropped_keys_nearby(gate: float, score_bound: float | None) -> None:
    """The nearest kept key takes all, however many dropped ones lie right of it."""
    query, key, value, _ = (x.detach() for x in inputs_here(2, batch=1, n_queries=150, dtype=torch.float16))
    key[:, :, 20:] = 0.0
    query, key = (x.clamp(-1, 1) / 4 for x in (query, key))
    log_forget = torch.full((1, 2, 150), gate, device=DEVICE)
    leaves = tuple(x.requires_grad_() for x in (query, key, value, log_forget))
    check(Inputs(*leaves), causal(150, 150), None, torch.float16, score_bound=score_bound)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_does_not_overflow_a_half(rate: float) -> None:
    ones = torch.ones(1, 1, 40, 16, device=DEVICE, dtype=torch.float16)
    rounding = torch.finfo(torch.float16).eps
    inputs = Inputs(ones, ones, ones, torch.zeros(1, 1, 40, device=DEVICE)).on(DEVICE)
    results = []
    for leaves, impl in ((inputs, "triton"), (inputs.to(torch.float64), "reference")):
        torch.manual_seed(3)
        out = tra.threshold_relative_attention(*leaves, dropout=rate, score_bound=4.0, impl=impl)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for got, right in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), right.double(), rtol=4 * rounding, atol=4 * rounding)


@pytest.mark.parametrize("score_bound", [8.0, *slow(None)])
def test_rows_that_keep_nothing(score_bound: float | None) -> None:
    query, key, value, log_forget = exact_inputs(3, batch=1, n_queries=150, dtype=torch.float16)
    with torch.no_grad():
        query[:, :, ::3] = 0.0
        query[:, 1] = 0.0
    inputs = Inputs(query, key, value, log_forget).on(DEVICE)
    check(inputs, causal(150, 150), {"scale": 0.125}, scale=0.125, score_bound=score_bound)
    out = tra.threshold_relative_attention(*inputs, impl="triton", score_bound=score_bound)
    assert not out[:, :, ::3].any()
    assert not out[:, 1].any()


def test_random_scores_off_the_threshold() -> None:
    """Normalised as in the layer. Where a score comes near the threshold, the key is masked for all."""
    generator = torch.Generator().manual_seed(0)
    query, key = (F.rms_norm(torch.randn(1, 1, 130, 64, generator=generator), (64,)) for _ in range(2))
    near = ((query.double() @ key.double().mT).abs() < 1e-4).any(2)
    value, gate = torch.randn(1, 1, 130, 64, generator=generator), torch.randn(1, 1, 130, generator=generator)
    inputs = Inputs(query, key, value, F.logsigmoid(gate)).to(torch.float32).on(DEVICE)
    check(inputs, causal(130, 130) & ~near[:, None], key_mask=~near[0].to(DEVICE), score_bound=8.0)


@pytest.mark.parametrize("lengths", [[5, 1, 130, 0, 64], *slow([200], [1] * 40, [64, 64, 72])], ids=str)
def test_packed_sequences_equal_one_by_one(lengths: list[int]) -> None:
    total = sum(lengths)
    padded = inputs_here(4, batch=1, heads=4, kv_heads=2, n_queries=total)
    packed = Inputs(*(x[0].transpose(0, 1).detach().requires_grad_() for x in padded))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = causal(total, total) & (document[:, None] == document)
    grad_out = torch.randn(total, 4, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out = tra.threshold_relative_attention_varlen(*packed, cu, impl="triton")
    got = (out.detach(), *torch.autograd.grad(out, packed, grad_out))
    exact = Inputs(*(x.detach().double().requires_grad_() for x in packed))
    judge = tra.threshold_relative_attention_varlen(*exact, cu, impl="reference")
    expected = (judge.detach(), *torch.autograd.grad(judge, exact, grad_out.double()))
    plainly = compare.run_plain(padded, grad_out.transpose(0, 1)[None], seen.to(DEVICE))
    plainly = tuple(x[0].transpose(0, 1) for x in plainly)
    floor = compare.rounding_floor(padded, grad_out.transpose(0, 1)[None])
    compare.assert_within_rule(got, plainly, expected, floor)


@pytest.mark.parametrize("chunked", [False, *slow(True)])
@MOSTLY_HALF
def test_any_layout_in_memory(dtype: torch.dtype, chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns apart, heads beside each other, a batch that is one tensor twice, gradients that are one number."""
    if chunked:
        monkeypatch.setattr(backward, "_transient_bytes", lambda _: 1)
    query, key, value, log_forget = (x.detach() for x in inputs_here(4, n_queries=100, dtype=dtype))
    laid_out = (
        query.mT.contiguous().mT,
        key.mT.contiguous().mT,
        value.transpose(1, 2).contiguous().transpose(1, 2),
        log_forget.transpose(1, 2).contiguous().transpose(1, 2),
    )
    plainly = Inputs(*(x.clone().contiguous().requires_grad_() for x in (query, key, value, log_forget)))
    for given, usual in ((laid_out, plainly), (tuple(x[:1].expand_as(x) for x in laid_out), None)):
        leaves = Inputs(*(x.requires_grad_() for x in given))
        if usual is None:
            usual = Inputs(*(x.detach().contiguous().requires_grad_() for x in leaves))
        grad_out = torch.ones((), device=DEVICE).expand(2, 2, 100, 16)
        for got, want in zip(run(leaves, grad_out, "triton"), run(usual, grad_out, "triton"), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("masked", [True, *slow(False)])
def test_dropout_is_the_reference_s_dropout(masked: bool) -> None:
    inputs = inputs_here(6, heads=4, kv_heads=2, n_queries=100, n_keys=150)
    mask = padding("middle", 2, 150).to(DEVICE) if masked else None
    grad_out = torch.randn(2, 4, 100, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for impl in ("reference", "triton"):
        torch.manual_seed(2)
        results.append(run(inputs, grad_out, impl, dropout=0.2, key_mask=mask))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_twice_run_is_bit_identical() -> None:
    inputs, grad_out = inputs_here(7, heads=4, kv_heads=2, n_queries=200), torch.ones(2, 4, 200, 16, device=DEVICE)
    first, second = (run(inputs, grad_out, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("number", [3, *slow(2, 6)])  # of 12 heads, and of 6 of keys
def test_in_whatever_order_blocks_are_taken_results_are_the_same(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, grad_out = inputs_here(17, heads=6, kv_heads=3, n_queries=150), torch.ones(2, 6, 150, 16, device=DEVICE)
    monkeypatch.setattr(launch, "MAX_FULL_WALK_KEYS", 150)  # long walks' gradients of queries aren't sorted
    results = []
    for sorted_together in (1, number):
        for module in (forward, backward):
            monkeypatch.setattr(module, "heads_sorted_together", lambda *_, found=sorted_together, **__: found)
        results.append(run(inputs, grad_out, "triton", tolerance=0.0))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("heads", "blocks", "expected"),
    [(1024, 7, 1), (1024, 8, 128), (1024, 16, 64), (96, 16, 48), (16, 256, 4), (17, 256, 1), (31, 64, 31)],
)
def test_how_many_heads_are_sorted_together(heads: int, blocks: int, expected: int) -> None:
    assert heads_sorted_together(heads, blocks) == expected
    assert heads_sorted_together(heads, blocks, early=True) == heads


@pytest.mark.parametrize(("heads", "expected"), [(1, 1), (8, 8), (16, 16), (17, 17), (34, 17), (1024, 16)])
def test_long_walks_share_their_keys_over_more_heads(heads: int, expected: int) -> None:
    assert heads_sorted_together(heads, 256, min_heads=16) == expected


@pytest.mark.skipif(ON_GPU, reason="long enough sequences have several parts there")
@pytest.mark.parametrize("masked", [True, *slow(False)])
def test_row_blocks_listed_in_parts(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.language as tl

    from tra.ops.triton import backward_kernels

    inputs, grad_out = inputs_here(19, batch=1, n_queries=330, n_keys=350), torch.ones(1, 2, 330, 16)
    inputs.log_forget.data.fill_(-0.05)
    inputs.log_forget.data[:, :, ::100] = 0.0  # their blocks' walks go all the way, others stop
    mask = padding("left", 1, 350) if masked else None
    whole = run(inputs, grad_out, "triton", key_mask=mask)
    monkeypatch.setattr(backward_kernels, "LISTED_AT_ONCE", tl.constexpr(2))  # of eleven
    parts = run(inputs, grad_out, "triton", key_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.skipif(ON_GPU, reason="there every tile is tested")
@MOSTLY_HALF
def test_how_many_threads_load_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the numbers of rows; compiled kernels have more threads than rows, or as many."""
    forward_tile, backward_tile = block_shapes.INTERPRETED
    inputs, grad_out = inputs_here(18, batch=1, n_queries=200, dtype=dtype), torch.ones(1, 2, 200, 16, dtype=dtype)
    inputs.log_forget.data.fill_(-1.0)  # so that most walks stop, and row blocks are listed
    inputs.log_forget.data[:, :, 150] = 0.0
    results = []
    for rows, warps in ((32, 1), (16, 1), (16, 4)):
        tile = backward_tile._replace(key_rows=rows, key_warps=warps)
        monkeypatch.setattr(block_shapes, "INTERPRETED", (forward_tile, tile))
        monkeypatch.setattr(block_shapes, "_chosen", {})
        results.append(run(inputs, grad_out, "triton", score_bound=8.0))
    assert all(torch.equal(a, b) for a, b in zip(*results[1:], strict=True))
    for one, other in zip(*results[:2], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_every_result_is_written(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN here, so an element left out, or read before it is written, would show."""
    inputs = inputs_here(8, heads=4, kv_heads=2, n_queries=150, n_keys=170)
    mask = padding("left", 2, 170).to(DEVICE) if masked else None
    for name in ("empty_like", "empty"):
        original = getattr(torch, name)

        def poisoned(*args: object, _original=original, **kwargs: object) -> Tensor:
            result = _original(*args, **kwargs)
            return result.fill_(torch.nan) if result.is_floating_point() else result.fill_(-(2**30))

        monkeypatch.setattr(torch, name, poisoned)
    new_empty = Tensor.new_empty

    def poisoned_new(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        result = new_empty(self, *args, **kwargs)
        return result.fill_(torch.nan) if result.is_floating_point() else result.fill_(-(2**30))

    monkeypatch.setattr(Tensor, "new_empty", poisoned_new)
    for options in ({}, {"score_bound": 16.0}, {"tolerance": 0.0}):
        for result in run(inputs, torch.ones(2, 4, 150, 16, device=DEVICE), "triton", key_mask=mask, **options):
            assert not result.isnan().any()


@pytest.mark.parametrize("masked", [False, *slow(True)])
@MOSTLY_HALF
def test_chunks_of_rows_add_up(dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so little room that every block of rows is a chunk of its own."""
    inputs = inputs_here(9, heads=4, kv_heads=2, n_queries=150, n_keys=170, dtype=dtype)
    mask = padding("right", 2, 170) if masked else torch.ones(2, 170, dtype=torch.bool)
    seen = causal(150, 170) & mask[:, None, None]
    monkeypatch.setattr(backward, "_transient_bytes", lambda _: 1)
    check(inputs, seen, key_mask=mask.to(DEVICE) if masked else None)


def oldest_read(inputs: tuple[Tensor, ...], tolerance: float, **options: float | None) -> Tensor:
    """`[B, H, Tq]`: the oldest key that each row's walk read."""
    query, key, value, log_forget = inputs
    scale = query.shape[3] ** -0.5
    return torch.ops.tra.fused_forward(
        query, key, value, log_forget, None, None, None,
        scale, 0.0, options.get("margin", 0.0), options.get("score_bound"), 0.0, tolerance, False,
    )[4]  # fmt: skip


def contents(kind: str, seed: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one head."""
    value = exact_inputs(seed, batch=1, heads=1, n_queries=length).value
    return tuple(x.detach().to(DEVICE) for x in (*compare.contents(kind, seed, length, heads=1, kept=0.05), value))


@pytest.mark.parametrize("content", ["dense", "sparse", "null rows", "far and strong"])
@pytest.mark.parametrize("gate", [-0.69, *slow(-20.0, -3.0, -0.13, -0.018, -1e-6, 0.0)])
@pytest.mark.parametrize("tolerance", [2.0**-24, *slow(1e-2)])
@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.float32)], ids=str)
def test_dropped_weight_is_within_tolerance(content: str, gate: float, tolerance: float, dtype: torch.dtype) -> None:
    """By the float64 definition, over the keys that the walk didn't read."""
    length = 2000 if ON_GPU else 300
    query, key, value = contents(content, 1, length)
    log_forget = torch.full((1, 1, length), gate, device=DEVICE) * (0.5 + torch.rand(length, device=DEVICE))
    exact = attention_map(query.double(), key.double(), log_forget.double()).weights
    highest = float((query.double() @ key.double().mT).abs().max()) / 4
    for score_bound in (None, highest):
        half = (x.to(dtype) for x in (query, key, value))
        stop = oldest_read((*half, log_forget), tolerance, score_bound=score_bound)
        unread = torch.arange(length, device=DEVICE) < stop[..., None]
        assert float(torch.where(unread, exact, 0.0).sum(-1).max()) <= tolerance


def test_short_sequences_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the full walk, though a head that forgets could stop."""
    query, key, value = contents("dense", 5, 300)
    inputs = (query, key, value, torch.full((1, 1, 300), -0.5, device=DEVICE))
    full = tra.threshold_relative_attention(*inputs, impl="triton", tolerance=0.0)
    assert not torch.equal(tra.threshold_relative_attention(*inputs, impl="triton", tolerance=0.3), full)
    monkeypatch.setattr(launch, "MAX_FULL_WALK_KEYS", 300)
    assert torch.equal(tra.threshold_relative_attention(*inputs, impl="triton", tolerance=0.3), full)


def test_a_forgetful_head_stops_and_a_remembering_one_does_not() -> None:
    query, key, value = contents("dense", 5, 400)
    forgetful, remembering = (torch.full((1, 1, 400), gate, device=DEVICE) for gate in (-2.0, 0.0))
    assert int(oldest_read((query, key, value, forgetful), 2.0**-24)[0, 0, -1]) > 200
    assert int(oldest_read((query, key, value, remembering), 2.0**-24).max()) == 0
    assert int(oldest_read((query, key, value, forgetful), 0.0).max()) == 0


@pytest.mark.parametrize("score_bound", [16.0, *slow(None)])
def test_gradients_with_a_stop_are_those_of_the_full_walk(score_bound: float | None) -> None:
    query, key, value = contents("dense", 6, 400)
    leaves = tuple(
        x.clone().requires_grad_() for x in (query, key, value, torch.full((1, 1, 400), -0.9, device=DEVICE))
    )
    assert int(oldest_read(leaves, 2.0**-24, score_bound=score_bound)[0, 0, -1]) > 0
    results = []
    for tolerance in (None, 0.0):
        out = tra.threshold_relative_attention(*leaves, tolerance=tolerance, score_bound=score_bound, impl="triton")
        results.append(torch.autograd.grad(out.sum(), leaves))
    for stopped, full in zip(*results, strict=True):
        torch.testing.assert_close(stopped, full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("small", ["query", "key"])
def test_the_bound_holds_where_squares_underflow(small: str) -> None:
    weak, strong = torch.full((1, 1, 300, 8), 1e-23), torch.full((1, 1, 300, 8), 1e16)
    query, key = (weak, strong) if small == "query" else (strong, weak)
    key[:, :, :150] *= 20
    value = torch.zeros(1, 1, 300, 1)
    value[:, :, :150] = 1.0
    inputs = (x.to(DEVICE) for x in (query, key, value, torch.full((1, 1, 300), -0.1)))
    out = tra.threshold_relative_attention(*inputs, scale=2.5e7, impl="triton")
    torch.testing.assert_close(out[..., -1, :].cpu(), torch.ones(1, 1, 1))


def test_nan_shows() -> None:
    """In a query: in its row. In a key without a promised bound: in every row that sees it, stop or no stop."""
    query, key, value = contents("dense", 5, 300)
    log_forget = torch.full((1, 1, 300), -2.0, device=DEVICE)
    lame = query.clone()
    lame[0, 0, 7, 3] = torch.nan
    for options in ({}, {"score_bound": 16.0}):
        out = tra.threshold_relative_attention(lame, key, value, log_forget, impl="triton", **options)
        assert out[0, 0, 7].isnan().all()
        assert not out[0, 0, 8:].isnan().any()
    lame = key.clone()
    lame[0, 0, 3] = torch.nan
    out = tra.threshold_relative_attention(query, lame, value, log_forget, impl="triton")
    assert out[0, 0, 3:].isnan().all()
    assert not out[0, 0, :3].isnan().any()


@DTYPES
@pytest.mark.parametrize("score_bound", [None, 8.0], ids=["online", "fixed"])
def test_a_nan_gate_shows(score_bound: float | None, dtype: torch.dtype) -> None:
    query, key, value, log_forget = inputs_here(3, batch=1, heads=1, n_queries=40, dtype=dtype)
    lame = log_forget.detach().clone()
    lame[0, 0, 7] = torch.nan
    out = tra.threshold_relative_attention(query, key, value, lame, scale=0.125, impl="triton", score_bound=score_bound)
    assert out[0, 0, 7].isnan().all()
    assert not out[0, 0, :7].isnan().any()
    assert not out[0, 0, 8:].isnan().any()


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("width", [16, 64, 128, 192, 256])
def test_all_passes_keep_the_same_keys(width: int, dtype: torch.dtype) -> None:
    """Unit vectors as values and as gradients: the output is then a row of weights, and so is each value's gradient.

    Scores are whatever rounding makes of them, so a pass that summed in another order would differ somewhere. The
    interpreter does: its products are a CPU library's.
    """
    length = 256
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, length, width, generator=generator).to(DEVICE, dtype) for _ in range(2))
    if dtype == torch.float32:  # many scores of about 1e-7: products that nearly cancel
        key[..., : width // 2] = key[..., width // 2 :]
        query[..., : width // 2] = -query[..., width // 2 :] * (1 + 2e-7)
    one_hot = torch.eye(length, dtype=dtype, device=DEVICE)[None, None]
    value = one_hot.clone().requires_grad_()
    log_forget = torch.zeros(1, 1, length, device=DEVICE)
    out = tra.threshold_relative_attention(query, key, value, log_forget, impl="triton", scale=1e-3)
    (grad_value,) = torch.autograd.grad(out, value, one_hot)
    assert 0.1 < float((out > 0).float().mean()) < 0.9
    assert torch.equal(out > 0, grad_value.mT > 0)


@pytest.mark.slow
def test_registered_with_torch_library() -> None:
    inputs = inputs_here(9, n_queries=40)
    first, last = (x.to(DEVICE, torch.int32) for x in (torch.zeros(2, 40), torch.arange(40).repeat(2, 1)))
    seed = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for ranges, dropout in (((None, None), 0.0), ((first, last), 0.1)):
        arguments = (*inputs, *ranges, seed, 0.25, 0.0, 0.0, None, dropout, 2.0**-24, True)
        torch.library.opcheck(torch.ops.tra.fused_forward.default, arguments)


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    """Heads beside each other in memory, as a layer has them."""
    inputs = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs_here(10, n_queries=70)))
    inputs = Inputs(*(x.detach().requires_grad_() for x in inputs))
    mask = padding("left", 2, 70).to(DEVICE)
    for key_mask in (None, mask):

        def attend(*args: Tensor, key_mask: Tensor | None = key_mask) -> Tensor:
            return tra.threshold_relative_attention(*args, key_mask=key_mask, impl="triton").square()

        eager = attend(*inputs)
        compiled = torch.compile(attend, fullgraph=True)(*inputs)
        torch.testing.assert_close(compiled, eager)
        grads = (torch.autograd.grad(out.sum(), inputs) for out in (compiled, eager))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_activation_checkpointing_repeats_the_dropout() -> None:
    check_checkpointing_repeats_dropout(inputs_here(11, n_queries=50), "triton")


def test_backward_under_autocast_computes_the_same() -> None:
    inputs = inputs_here(12, batch=1, n_queries=100)
    grads = []
    for enabled in (False, True):
        out = tra.threshold_relative_attention(*inputs, impl="triton")
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: [y.double() for y in x], "not in torch.float64"),
        (lambda x: [F.pad(y, (0, 300)) for y in x[:3]] + [x[3]], "at most 256 wide, got 316"),
    ],
)
def test_what_it_cannot_take_it_says(change, message: str) -> None:  # type: ignore[no-untyped-def]
    inputs = change([x.detach() for x in inputs_here(0, n_queries=5)])
    with pytest.raises(RuntimeError, match=message):
        tra.threshold_relative_attention(*inputs, impl="triton")


def tiles_of(table: dict[tuple[int, int], tuple[block_shapes.Tile, ...]]) -> list[tuple[int, int, block_shapes.Tile]]:
    return [(size, width, tile) for (size, width), tiles in table.items() for tile in tiles]


ALL_TILES = [
    *tiles_of(block_shapes.FORWARD),
    *dict.fromkeys(tiles_of(block_shapes.BACKWARD) + tiles_of(block_shapes.BACKWARD_SHORT)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "width", "tile"), ALL_TILES, ids=str)
def test_every_tile(size: int, width: int, tile: block_shapes.Forward | block_shapes.Backward, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Also those that another GPU would take."""
    listed = block_shapes.candidates

    def only(table, *args):  # type: ignore[no-untyped-def]
        return (tile,) if isinstance(tile, type(next(iter(table.values()))[0])) else listed(table, *args)

    monkeypatch.setattr(block_shapes, "candidates", only)
    monkeypatch.setattr(block_shapes, "_chosen", {})
    dtype = torch.bfloat16 if size == 2 else torch.float32
    inputs = inputs_here(1, heads=4, kv_heads=2, n_queries=300, width=width, dtype=dtype)
    check(inputs, causal(300, 300), {"scale": 1 / width}, scale=1 / width, score_bound=4.0)


class Memory:
    """A GPU's properties, as far as they are asked for."""

    def __init__(self, shared: int) -> None:
        self.shared_memory_per_block_optin = shared


@pytest.mark.parametrize("shared", [48 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_small_gpu_gets_a_small_tile(shared: int, width: int, itemsize: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Memory(shared))
    for table in (block_shapes.FORWARD, block_shapes.BACKWARD, block_shapes.BACKWARD_SHORT):
        tiles = block_shapes.candidates(table, width, width, itemsize, torch.device("cuda"))
        assert tiles
        if shared >= 99 << 10:  # the least that any GPU since Ampere has
            assert all(tile.shared_memory(width, width, itemsize) <= shared for tile in tiles)


def test_a_tile_that_does_not_fit_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    monkeypatch.setattr(block_shapes, "_chosen", {})
    tiles = block_shapes.FORWARD[2, 64]
    launched = []

    def launch(tile: block_shapes.Forward) -> None:
        launched.append(tile)
        if tile is tiles[0]:
            raise OutOfResources(1 << 20, 1 << 16, "shared memory")

    for _ in range(2):
        block_shapes.run("kind", 100, tiles, launch)
    assert launched == [tiles[0], tiles[1], tiles[1]]


@pytest.mark.gpu
def test_tuning_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length within the same power of two starts no new search."""
    monkeypatch.setattr(block_shapes, "_chosen", {})
    monkeypatch.setenv("TRA_AUTOTUNE", "1")
    for length in (300, 500, 600):
        inputs = inputs_here(1, n_queries=length, width=64, dtype=torch.bfloat16)
        tra.threshold_relative_attention(*inputs, impl="triton")
    assert len(block_shapes._chosen) == 2


@pytest.mark.gpu
def test_captured_in_a_cuda_graph() -> None:
    inputs = inputs_here(13, n_queries=300, width=64, dtype=torch.bfloat16)
    grad_out = torch.randn(2, 2, 300, 64, device=DEVICE, dtype=torch.bfloat16)
    expected = run(inputs, grad_out, "triton", score_bound=64.0)  # also compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(inputs, grad_out, "triton", score_bound=64.0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs, grad_out, "triton", score_bound=64.0)
    for x in captured:
        x.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"impl": "auto"}])
def test_the_layer_takes_the_kernels_by_itself(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In training by way of one operator, else as they are."""
    called = []
    for name in ("projected_forward", "fused_forward"):
        original = getattr(torch.ops.tra, name)
        monkeypatch.setattr(
            torch.ops.tra, name, lambda *args, name=name, original=original: called.append(name) or original(*args)
        )
    layer = tra.ThresholdRelativeAttention(128, 4, fuse_projections=True, **options).cuda()
    x = torch.randn(2, 64, 128, device="cuda")
    layer(x).sum().backward()
    with torch.no_grad():
        layer(x)
    assert called == ["projected_forward", "fused_forward", "fused_forward"]
