"""A margin: keys that stay in the softmax without counting as distance. Every implementation, by the usual rule.

On a CPU the kernels run in Triton's interpreter; with a GPU the same tests run there.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tra
from tests.ops import compare
from tests.ops.compare import Inputs, causal, exact_inputs, padding, run
from tests.ops.test_fused import BFLOAT16, DEVICE
from tests.slow import slow
from tra.ops import attention_map, newest_first
from tra.ops.options import AttentionOptions
from tra.ops.triton import decode, decode_plan, launch
from tra.ops.visible import visible_keys

MARGINS = (2.0, *slow(0.5, math.inf))
ALL_MARGINS = (0.5, 2.0, math.inf)
IMPLEMENTATIONS = ("reference", "blockwise", "triton")
HALF = pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16], ids=str)
pytestmark = pytest.mark.filterwarnings(  # of the interpreter
    "ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"
)


@pytest.fixture(autouse=True)
def stops_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_FULL_WALK_KEYS", 0)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make decoding divide short caches into several phases of several pieces."""
    sizes = {"PIECE_KEYS": 32, "LATER_PIECE_KEYS": 64, "PHASE_GROWTH": 4, "MAX_FIRST_PIECES": 4}
    for name in ("MAX_SHORT_KEYS", "MAX_ONE_PIECE_KEYS", "MAX_ONE_PIECE_KEYS_FULL"):
        sizes[name] = 0
    for name, size in sizes.items():
        monkeypatch.setattr(decode_plan, name, size)
    monkeypatch.setattr(decode_plan, "processor_count", lambda _: 8)


def inputs_here(seed: int, **options: object) -> Inputs:
    return exact_inputs(seed, **options).on(DEVICE)


def check(inputs: Inputs, seen: Tensor, impl: str, margin: float, floor: torch.dtype | None = None, **options) -> None:  # type: ignore[no-untyped-def]
    plain = {"margin": margin} | {key: options[key] for key in ("scale", "threshold") if key in options}
    compare.check(inputs, seen, impl, plain, floor, margin=margin, **options)


def by_hand(scores: Tensor, log_forget: Tensor, threshold: float, margin: float) -> Tensor:
    """Return the weights of one row, key by key, straight from the definition."""
    logits, right = [-math.inf] * len(scores), 0
    for j in range(len(scores) - 1, -1, -1):
        score = float(scores[j])
        if margin == math.inf or score > threshold - margin:
            logits[j] = score + float(log_forget) * (right + 1)
        right += score > threshold
    highest = max(logits)
    if highest == -math.inf:
        return torch.zeros(len(scores), dtype=torch.float64)
    powers = torch.tensor([math.exp(x - highest) for x in logits], dtype=torch.float64)
    return powers / powers.sum()


@pytest.mark.parametrize("margin", [0.0, *ALL_MARGINS])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_by_hand(impl: str, margin: float) -> None:
    """Each row against a loop over its keys; values are unit vectors, so weights come out."""
    query, key, _, log_forget = (x.detach() for x in inputs_here(1, batch=1, heads=1, n_queries=40, width=4))
    value = torch.eye(40, device=DEVICE)[None, None]
    out = tra.threshold_relative_attention(
        query, key, value, log_forget, scale=0.5, threshold=0.25, margin=margin, impl=impl
    )
    scores = (query @ key.mT * 0.5).double().cpu()
    for i in range(40):
        right = by_hand(scores[0, 0, i, : i + 1], log_forget[0, 0, i], 0.25, margin)
        torch.testing.assert_close(out[0, 0, i, : i + 1].double().cpu(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score_bound", [None, 8.0], ids=["online", "fixed"])
@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("length", [63, *slow(1, 111, 257)])
@HALF
def test_lengths(length: int, margin: float, score_bound: float | None, dtype: torch.dtype) -> None:
    inputs = inputs_here(length, n_queries=length, dtype=dtype)
    floor = dtype if length == 1 and score_bound is not None else None
    check(inputs, causal(length, length), "triton", margin, floor, scale=0.125, score_bound=score_bound)


@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_float32(impl: str, margin: float) -> None:
    check(inputs_here(3, n_queries=111), causal(111, 111), impl, margin, scale=0.25)


@pytest.mark.parametrize("margin", [2.0, *slow(math.inf)])
@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_grouped_heads_padding_and_lengths(impl: str, margin: float) -> None:
    """Other value width, fewer queries than keys, padding in the middle, a static cache, a negative scale."""
    inputs = inputs_here(4, heads=4, kv_heads=2, n_queries=50, n_keys=200, value_width=40)
    mask, lengths = padding("middle", 2, 200), torch.tensor([180, 90], dtype=torch.int32)
    last = lengths[:, None] - 50 + torch.arange(50)
    seen = (torch.arange(200) <= last[..., None]) & mask[:, None]
    options = {"key_mask": mask.to(DEVICE), "key_lengths": lengths.to(DEVICE), "scale": -0.25, "threshold": 0.3}
    check(inputs, seen[:, None], impl, margin, **options)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_packed_sequences(impl: str) -> None:
    inputs = inputs_here(5, batch=1, n_queries=150)
    cu = torch.tensor([0, 40, 41, 150], dtype=torch.int32, device=DEVICE)
    packed = [x[0].transpose(0, 1).detach().requires_grad_() for x in inputs]
    out = tra.threshold_relative_attention_varlen(*packed, cu, margin=2.0, impl=impl, scale=0.25)
    alone = torch.cat(
        [
            tra.threshold_relative_attention(*(x[:, :, a:b] for x in inputs), margin=2.0, impl="reference", scale=0.25)
            for a, b in ((0, 40), (40, 41), (41, 150))
        ],
        2,
    )
    torch.testing.assert_close(out, alone[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out.square().sum(), packed)
    expected = torch.autograd.grad(alone.square().sum(), tuple(inputs))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_dropout_is_the_reference_s_dropout(impl: str) -> None:
    inputs = inputs_here(6, batch=1, n_queries=70)
    results = []
    for name in ("reference", impl):
        torch.manual_seed(2)
        results.append(run(inputs, torch.ones(1, 2, 70, 16, device=DEVICE), name, dropout=0.2, margin=2.0))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("margin", ALL_MARGINS)
@pytest.mark.parametrize("score_bound", [32.0, None], ids=["early", "full"])
@HALF
def test_decoding(dtype: torch.dtype, score_bound: float | None, margin: float, small_pieces: None) -> None:
    """Several phases of several pieces, each merged with the counts of newer ones."""
    inputs = Inputs(*(x.detach() for x in inputs_here(7, heads=2, kv_heads=1, n_queries=3, n_keys=700, dtype=dtype)))
    with torch.no_grad():
        options = {"score_bound": score_bound, "margin": margin}
        got = tra.threshold_relative_attention(*inputs, impl="triton", **options)
        right = tra.threshold_relative_attention(*inputs.to(torch.float64), impl="reference", **options)
        plain = compare.plain_attention(*inputs, causal(3, 700).to(DEVICE), margin=margin)
        error, allowed = compare.errors(got, plain, right, 2e-7)
    assert error <= allowed


def test_decoding_keeps_and_counts_what_the_forward_kernel_does() -> None:
    """Random, unrounded inputs; no gate, so weights show which keys stay, and a steep one, so they show counts."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    query, key = (torch.randn(1, 4, 96, 64, generator=generator).to(DEVICE, dtype) for _ in range(2))
    value = torch.eye(96, device=DEVICE, dtype=dtype).expand(1, 4, -1, -1)
    for gate in (0.0, -0.25):
        gates = torch.full((1, 4, 96), gate, device=DEVICE)
        rows = [
            tra.threshold_relative_attention(
                query[:, :, i : i + 1], key[:, :, : i + 1], value[:, :, : i + 1], gates[:, :, :1],
                margin=1.0, impl="triton",
            )
            for i in range(16, 96, 8)
        ]  # fmt: skip
        leaves = [x.detach().requires_grad_() for x in (query, key, value, gates)]  # gradients: the forward kernel
        blocks = tra.threshold_relative_attention(*leaves, margin=1.0, impl="triton").detach()
        for row, i in zip(rows, range(16, 96, 8), strict=True):
            assert torch.equal(row[:, :, 0] > 0, blocks[:, :, i] > 0)
            torch.testing.assert_close(row[:, :, 0].float(), blocks[:, :, i].float(), rtol=2e-2, atol=1e-3)


def only(kind: str, seed: int, length: int) -> tuple[Tensor, Tensor]:
    """Return queries and keys `[1, 2, T, 16]` whose rows hold only margin keys, only counted keys, or neither."""
    query, key = (x.detach().abs() + 0.25 for x in exact_inputs(seed, batch=1, n_queries=length)[:2])
    sign = {"counted": 1.0, "margin": -1.0, "nothing": -1.0, "both": 1.0}[kind]
    key = key * sign
    if kind == "both":
        key[:, :, torch.rand(length, generator=torch.Generator().manual_seed(seed)) < 0.7] *= -1
    return query, key


@pytest.mark.parametrize("slope", [-1e4, *slow(-1e-3, -1.0, -30.0, -1e2, -1e6, -1e10, -1e20, -1e30)])
@pytest.mark.parametrize("kind", ["margin", "both", *slow("counted", "nothing")])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float16, 40.0),
        (torch.float32, None),
        *slow((torch.float16, None), (torch.float32, 40.0)),
        pytest.param(torch.bfloat16, 40.0, marks=pytest.mark.gpu),
    ],
)
def test_steep_gates(dtype: torch.dtype, bound: float | None, kind: str, slope: float) -> None:
    """Output and gradients against float64, forward and decode, whatever kinds of keys a row holds."""
    query, key = only(kind, 3, 70)
    scale = 0.25
    margin = 0.25 if kind == "nothing" else 64.0  # scores lie in ±16
    if kind == "nothing":
        key = key * 4  # every score is below -0.25
    value, grad_out = (torch.randn(1, 2, 70, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    gates = torch.full((1, 2, 70), slope)
    results = []
    for kind_of, impl in ((dtype, "triton"), (torch.float64, "reference")):
        wide = torch.float64 if kind_of == torch.float64 else torch.float32
        leaves = [x.to(dtype).to(DEVICE, kind_of).requires_grad_() for x in (query, key, value)]
        leaves.append(gates.to(DEVICE, wide).requires_grad_())
        options = {"scale": scale, "margin": margin, "score_bound": bound, "impl": impl}
        out = tra.threshold_relative_attention(*leaves, **options)
        grads = torch.autograd.grad(out, leaves, grad_out.to(dtype).to(out))
        with torch.no_grad():
            few = tra.threshold_relative_attention(leaves[0][:, :, -3:], *leaves[1:3], leaves[3][:, :, -3:], **options)
        results.append([x.double() for x in (out.detach(), few, *grads)])
    allowed = 4e-6 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 4e-3
    for name, got, right in zip(("output", "decoded", "query", "key", "value", "forget"), *results, strict=True):
        assert (got - right).abs().max() <= allowed * max(1.0, float(right.abs().max())), name


def contents(kind: str, seed: int, length: int) -> tuple[Tensor, Tensor]:
    """As for the stop without a margin; "inside": long rows of keys inside the margin before the counted ones."""
    if kind == "inside":
        query, key = only("margin", seed, length)
        key[:, :, -length // 8 :] *= -1
        return query, key
    return compare.contents(kind, seed, length)


def dropped_weight(query: Tensor, key: Tensor, log_forget: Tensor, tolerance: float, impl: str, **options) -> float:  # type: ignore[no-untyped-def]
    """Return the largest weight of a row, by the float64 definition, of keys that the walk didn't read."""
    length = query.shape[2]
    value = torch.eye(length, device=query.device, dtype=query.dtype).expand(1, query.shape[1], -1, -1)
    got = tra.threshold_relative_attention(
        query, key, value, log_forget, tolerance=tolerance, impl=impl, scale=0.25, **options
    )
    options.pop("score_bound", None)
    exact = attention_map(query.double(), key.double(), log_forget.double(), scale=0.25, **options).weights
    tiny = 2.0**-24 if query.dtype == torch.float16 else 1e-38  # a weight that the dtype holds as 0 can't be told apart
    dropped = torch.where((got == 0) & (exact > tiny), exact, 0.0).sum(-1)
    return float(dropped.max())


@pytest.mark.parametrize("margin", [2.0, math.inf])
@pytest.mark.parametrize("kind", ["inside", "far and strong", *slow("dense", "sparse", "null rows")])
@pytest.mark.parametrize("gate", [-0.69, *slow(-20.0, -3.0, -0.13, -0.018, -1e-3, 0.0)])
@pytest.mark.parametrize("impl", ["blockwise", *slow("triton")])
def test_the_stop_leaves_out_no_more_than_it_promises(impl: str, gate: float, kind: str, margin: float) -> None:
    length = 1100 if impl == "blockwise" else 250
    query, key = (x.to(DEVICE) for x in contents(kind, 1, length))
    log_forget = torch.full((1, 2, length), gate, device=DEVICE)
    bound = float((query.double() @ key.double().mT).abs().max()) / 4
    for options in ({}, {"score_bound": bound}):
        for tolerance in (2.0**-24, 1e-2):
            dropped = dropped_weight(query, key, log_forget, tolerance, impl, margin=margin, **options)
            assert dropped <= tolerance


@pytest.mark.parametrize("form", ["newest-first", *slow("decode")])
@pytest.mark.parametrize("theta", [8.0, *slow(-3.0, 0.0, 6.0, 50.0)])
@pytest.mark.parametrize("gate", [-0.7, *slow(-0.05, -0.2, -3.0, -1e10)])
def test_the_stop_of_few_queries_at_its_worst(
    form: str, theta: float, gate: float, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few keys that count, then the largest scores there can be: of keys inside the margin, then of any."""
    monkeypatch.setattr(newest_first, "FIRST_MAP_KEYS", 32)
    monkeypatch.setattr(newest_first, "MAP_GROWTH", 2)
    monkeypatch.setattr(decode_plan, "processor_count", lambda _: 2)  # with more than blocks, all are read at once
    length, bound, gates = 250, 8.0, torch.full((1, 1, 1), gate, device=DEVICE)
    query = F.pad(torch.ones(1, 1, 1, 1, device=DEVICE), (0, 15))
    value = torch.eye(length, device=DEVICE)[None, None]
    for n_counted in (0, 2, 20):
        scores = torch.full((length,), min(theta, bound))
        scores[: length // 2] = bound
        scores[length - n_counted :] = min(theta + 2**-12, bound)
        key = F.pad(scores[None, None, :, None].to(DEVICE), (0, 15))
        exact = attention_map(
            query.double(), key.double(), gates.double(), scale=1.0, threshold=theta, margin=2.0
        ).weights
        for tolerance in (2.0**-24, 0.3):
            options = AttentionOptions(1.0, theta, bound, tolerance=tolerance, margin=2.0)
            if form == "decode":
                got = decode.decode_attention(query, key, value, gates, None, None, None, options)
            else:
                visible = visible_keys(query, key, None, None)
                got = newest_first.newest_first_attention(query, key, value, gates, visible, options)
            dropped = torch.where((got == 0) & (exact > 1e-38), exact, 0.0).sum()
            assert dropped <= tolerance
            assert (got - exact).abs().sum() <= 2 * tolerance + 1e-4


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**20),
    kind=st.sampled_from(["dense", "sparse", "null rows", "far and strong", "inside"]),
    exponent=st.floats(-6, math.log10(20)),
    threshold=st.sampled_from([0.0, -2.0, 1.5]),
    margin=st.sampled_from([0.25, 1.0, 4.0, math.inf]),
    tolerance=st.sampled_from([2.0**-24, 1e-5, 1e-2, 0.3]),
)
def test_the_stop_over_random_gates(
    seed: int, kind: str, exponent: float, threshold: float, margin: float, tolerance: float
) -> None:
    query, key = contents(kind, seed, 1100)
    generator = torch.Generator().manual_seed(seed)
    log_forget = -(10**exponent) * torch.rand(1, 2, 1100, generator=generator).clamp(min=0.5)
    dropped = dropped_weight(query, key, log_forget, tolerance, "blockwise", threshold=threshold, margin=margin)
    assert dropped <= tolerance


def test_walks_do_stop() -> None:
    """Keys inside the margin delay the stop, and don't prevent it."""
    torch.manual_seed(0)
    query, key = (F.normalize(torch.randn(1, 1, 2000, 16), dim=-1) * 4 for _ in range(2))
    gates, last = torch.full((1, 1, 2000), -0.69), torch.arange(2000)[None]
    for margin in (0.0, 2.0, math.inf):
        *_, stops = torch.ops.tra.blockwise_forward(
            query, key, key, gates, torch.zeros_like(last), last, torch.zeros(1, dtype=torch.int64),
            0.25, 0.0, margin, 4.0, 0.0, 2.0**-24,
        )  # fmt: skip
        assert stops[0, -1] >= 6  # of blocks 0 to 7


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_margin_of_0_and_equal_cuts_change_no_bit(impl: str) -> None:
    inputs, grad_out = inputs_here(8, batch=1, n_queries=70), torch.ones(1, 2, 70, 16, device=DEVICE)
    usual = run(inputs, grad_out, impl)
    for options in ({"margin": 0.0}, {"margin": -0.0}):
        assert all(torch.equal(a, b) for a, b in zip(run(inputs, grad_out, impl, **options), usual, strict=True))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_infinite_margin_masks_nothing(impl: str) -> None:
    """Plain causal softmax where gates are open, also with a score of -inf, which weighs 0; alone, its row is 0."""
    query, key, value, _ = (x.detach() for x in inputs_here(9, batch=1, n_queries=70, width=16))
    gates = torch.zeros(1, 2, 70, device=DEVICE)
    for threshold in (0.0, 5.0, math.inf):
        out = tra.threshold_relative_attention(
            query, key, value, gates, threshold=threshold, margin=math.inf, impl=impl
        )
        expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    query, key = query.abs() + 1, key.clone()
    key[:, :, :3] = -torch.inf
    out = tra.threshold_relative_attention(query, key, value, gates, margin=math.inf, impl=impl)
    expected = F.scaled_dot_product_attention(query[:, :, 3:], key[:, :, 3:], value[:, :, 3:], is_causal=True)
    assert not out[:, :, :3].any()
    torch.testing.assert_close(out[:, :, 3:], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_nan_shows(impl: str) -> None:
    for margin in (2.0, math.inf):
        query, key, value, gates = (x.detach().clone() for x in inputs_here(9, batch=1, n_queries=70))
        key[:, :, 30] = torch.nan
        out = tra.threshold_relative_attention(query, key, value, gates, margin=margin, impl=impl, tolerance=0.0)
        assert out[:, :, 30:].isnan().all()
        assert out[:, :, :30].isfinite().all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("margin", [0.5, 2.0])
def test_keys_at_or_below_the_lower_cut_change_nothing(impl: str, margin: float) -> None:
    """Insert keys anywhere, at the cut exactly or below it: neither weights nor distances move."""
    query, key, value, log_forget = (x.detach() for x in exact_inputs(11, batch=1, n_queries=1, n_keys=60))
    query, key = F.pad(query, (1, 0), value=1.0), F.pad(key, (1, 0), value=0.0)
    generator = torch.Generator().manual_seed(0)
    distractor = torch.zeros(1, 2, 40, key.shape[3])
    distractor[..., 0] = -4 * margin - torch.randint(0, 3, (1, 2, 40), generator=generator) / 2
    places = torch.randperm(100, generator=generator)[:60].sort().values
    others = torch.ones(100, dtype=torch.bool)
    others[places] = False
    new_key, new_value = key.new_empty(1, 2, 100, key.shape[3]), value.new_empty(1, 2, 100, value.shape[3])
    new_key[:, :, places], new_key[:, :, others] = key, distractor
    new_value[:, :, places], new_value[:, :, others] = value, torch.randn(1, 2, 40, 16, generator=generator)
    short, long = (
        tra.threshold_relative_attention(
            *(x.to(DEVICE) for x in (query, k, v, log_forget)), scale=0.25, margin=margin, impl=impl, tolerance=0.0
        )
        for k, v in ((key, value), (new_key, new_value))
    )
    torch.testing.assert_close(long, short, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_float64_gradcheck(impl: str) -> None:
    inputs = exact_inputs(3, heads=4, kv_heads=2, n_queries=5, n_keys=7, width=4, value_width=3, dtype=torch.float64)

    def attend(*args: Tensor) -> Tensor:
        return tra.threshold_relative_attention(*args, threshold=1 / 64, margin=0.75, impl=impl, tolerance=0.0)

    assert torch.autograd.gradcheck(attend, tuple(inputs))


def test_the_map_tells_who_stays_and_who_counts() -> None:
    query, key, value, log_forget = exact_inputs(5, n_queries=37, n_keys=50, dtype=torch.float64)
    found = attention_map(query, key, log_forget, margin=1.0, rows_at_once=8)
    out = tra.threshold_relative_attention(query, key, value, log_forget, margin=1.0, impl="reference")
    torch.testing.assert_close(found.weights @ value, out)
    visible = causal(37, 50)[0, 0]
    assert torch.equal(found.counted, (found.scores > 0) & visible)
    assert torch.equal(found.kept, (found.scores > -1) & visible)
    assert bool((found.kept & ~found.counted).any())
    right = found.counted.flip(-1).cumsum(-1).flip(-1) - found.counted.long()
    assert torch.equal(found.distances, ((right + 1) * found.kept).double())


@pytest.mark.parametrize("margin", [-1.0, -math.inf, math.nan])
def test_bad_margins(margin: float) -> None:
    inputs = exact_inputs(1, n_queries=4)
    with pytest.raises(ValueError, match="margin must be at least 0"):
        tra.threshold_relative_attention(*inputs, margin=margin)


def test_the_lower_cut() -> None:
    def cut(threshold: float, margin: float) -> float:
        return AttentionOptions(1.0, threshold, margin=margin).lower_cut

    assert cut(0.1, 2.0) == 0.1 - 2.0
    assert cut(math.inf, math.inf) == cut(-math.inf, 0.0) == cut(0.0, math.inf) == -math.inf
    assert cut(math.inf, 1.0) == math.inf
