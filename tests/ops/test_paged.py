"""Keys in pages: what lies anywhere is what lies side by side, and a ring is a sequence whose old keys are hidden.

The oracle is the definition in float64, called for one query at a time on the keys that its window has. On a CPU the
kernels run in Triton's interpreter; with a GPU the same tests run there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tra
from tests.ops.compare import Inputs, exact_inputs
from tests.ops.test_fused import DEVICE, MOSTLY_HALF
from tests.slow import slow
from tra.bench.judge import errors, plain_attention, rms
from tra.ops import choice, newest_first
from tra.ops.paged import windows_suffice
from tra.ops.triton import decode, decode_plan
from tra.ops.visible import PagedKeys

pytestmark = pytest.mark.filterwarnings(  # of the interpreter
    "ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"
)
MARGINS = pytest.mark.parametrize("margin", [0.0, 2.0, math.inf])
PAGE = 64


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Several phases of several pieces in short inputs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PIECE_KEYS": 32, "LATER_PIECE_KEYS": 64, "PHASE_GROWTH": 4, "MAX_FIRST_PIECES": 4}.items():
            patch.setattr(decode_plan, name, value)
        for name in ("MAX_SHORT_KEYS", "MAX_ONE_PIECE_KEYS", "MAX_ONE_PIECE_KEYS_FULL"):
            patch.setattr(decode_plan, name, 0)
        patch.setattr(decode_plan, "processor_count", lambda _: 4)
        yield


def paged(inputs: Inputs, lengths: list[int], columns: int, *, permuted: bool = True) -> list[Tensor]:
    """Return key pages, value pages, table and lengths of rows whose keys were written in turn, as a ring's are.

    Pages, and slots that are not written, hold something else.
    """
    batch, heads = inputs.key.shape[:2]
    generator = torch.Generator().manual_seed(len(lengths) + columns)
    pages = batch * columns
    order = torch.randperm(pages + 3, generator=generator) if permuted else torch.arange(pages)
    table = order[:pages].view(batch, columns).to(torch.int32)
    pools = []
    for tensor in (inputs.key, inputs.value):
        pool = torch.full((len(order), heads, PAGE, tensor.shape[3]), 7.0, dtype=tensor.dtype)
        for row, length in enumerate(lengths):
            for start in range(0, length, PAGE):
                part = tensor[row, :, start : min(start + PAGE, length)].cpu()
                pool[table[row, start // PAGE % columns], :, : part.shape[1]] = part
        pools.append(pool)
    found = [*pools, table, torch.tensor(lengths, dtype=torch.int32)]
    return [x.to(DEVICE) for x in found]


def make(seed: int, **options: object) -> Inputs:
    return Inputs(*(x.detach().to(DEVICE) for x in exact_inputs(seed, **options)))  # type: ignore[arg-type]


def attend(inputs: Inputs, pages: list[Tensor], **options: object) -> Tensor:
    key, value, table, lengths = pages
    with torch.no_grad():
        return tra.threshold_relative_attention_paged(
            inputs.query, key, value, inputs.log_forget, table, lengths, **options
        )


def one_by_one(inputs: Inputs, lengths: list[int], window: int | None, **options: object) -> Tensor:
    """The definition in float64: each query on the keys that it sees, and none for those before the first token."""
    query, key, value, log_forget = (x.detach().double() for x in inputs)
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    for row, length in enumerate(lengths):
        for index in range(query.shape[2]):
            end = length - query.shape[2] + index + 1
            begin = 0 if window is None else max(0, end - window)
            if end > 0:
                one = query[row, :, index][None, :, None], key[row, None, :, begin:end], value[row, None, :, begin:end]
                gate = log_forget[row, :, index][None, :, None]
                out[row, :, index] = tra.threshold_relative_attention(*one, gate, impl="reference", **options)[0, :, 0]
    return out


def seen_keys(inputs: Inputs, lengths: list[int], window: int | None) -> Tensor:
    last = torch.tensor(lengths)[:, None] - inputs.query.shape[2] + torch.arange(inputs.query.shape[2])
    index = torch.arange(inputs.key.shape[2])
    seen = index <= last[..., None]
    return (seen if window is None else seen & (index > last[..., None] - window))[:, None].to(DEVICE)


def check(inputs: Inputs, lengths: list[int], columns: int, window: int | None, impl: str, **options: object) -> None:
    """By the rule: twice plain PyTorch's error, or two roundings of a typical value."""
    got = attend(inputs, paged(inputs, lengths, columns), window=window, impl=impl, **options)
    named = {name: value for name, value in options.items() if name in ("scale", "threshold", "margin")}
    right = one_by_one(inputs, lengths, window, **named)
    plainly = plain_attention(*inputs, seen_keys(inputs, lengths, window), **named)
    error, allowed = errors(got, plainly, right, 2 * torch.finfo(torch.float32).eps * rms(inputs.value.double()))
    assert error <= allowed, f"error {error:.3g} exceeds {allowed:.3g}"


BOUNDS = pytest.mark.parametrize("score_bound", [16.0, *slow(None)], ids=lambda bound: f"bound {bound}")


@MARGINS
@BOUNDS
@MOSTLY_HALF
@pytest.mark.parametrize("n_queries", [1, *slow(5)])
def test_rings_in_the_kernel(n_queries: int, dtype: torch.dtype, score_bound: float | None, margin: float) -> None:
    """Over several turns, rows of several lengths, one that has not filled its ring and one that has just begun."""
    lengths, window = [530, 90, 7], 70
    inputs = make(1, batch=3, heads=2, kv_heads=1, n_queries=n_queries, n_keys=530, value_width=32, dtype=dtype)
    options = {"margin": margin, "score_bound": score_bound}
    check(inputs, lengths, 2, window, "triton", **options)


@MARGINS
@pytest.mark.parametrize("impl", ["auto", "reference", *slow("blockwise", "triton")])
@pytest.mark.parametrize("n_queries", [1, 3, 40])
def test_rings_in_pytorch(n_queries: int, impl: str, margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries, newest first, and those of a prompt."""
    monkeypatch.setattr(newest_first, "FIRST_MAP_KEYS", 64)
    monkeypatch.setattr(newest_first, "MAP_GROWTH", 2)
    monkeypatch.setattr(choice, "MAX_REFERENCE_KEYS", 16)
    inputs = make(2, batch=3, heads=4, kv_heads=2, n_queries=n_queries, n_keys=700)
    check(inputs, [700, 300, 41], 4, 200, impl, margin=margin, score_bound=16.0)


@pytest.mark.parametrize(
    ("window", "impl"),
    [
        (65, "triton"),
        *((window, "auto") for window in (1, 63, 64, 65, 127, 128)),
        *slow(*((window, "triton") for window in (1, 63, 64, 127, 128))),
    ],
)
def test_windows_of_any_size(window: int, impl: str) -> None:
    """Up to the whole table, at every place in a page."""
    lengths = [128, 129, 191, 192, 255]
    inputs = make(3, batch=5, heads=1, n_queries=1, n_keys=256)
    check(inputs, lengths, 2, window, impl, score_bound=16.0)


@MARGINS
@MOSTLY_HALF
@pytest.mark.parametrize("gate", [None, *slow(-3.0)])
def test_where_pages_lie_changes_no_bit(dtype: torch.dtype, margin: float, gate: float | None) -> None:
    """The same bits as contiguous keys, which tables of any order are compared with."""
    lengths = [250, 65]
    inputs = make(4, batch=2, heads=2, kv_heads=1, n_queries=2, n_keys=250, dtype=dtype)
    if gate is not None:
        inputs.log_forget.fill_(gate)
    options = {"margin": margin, "score_bound": 16.0, "impl": "triton"}
    query, *keys, gate = inputs
    key, value = (torch.nn.functional.pad(x, (0, 0, 0, 6)) for x in keys)  # as many slots as pages have
    with torch.no_grad():
        lengths_there = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        right = tra.threshold_relative_attention(query, key, value, gate, key_lengths=lengths_there, **options)
    for permuted in (False, True):
        assert torch.equal(attend(inputs, paged(inputs, lengths, 4, permuted=permuted), **options), right)


@MARGINS
def test_a_ring_keeps_the_keys_that_contiguous_keys_keep(margin: float) -> None:
    """Unit vectors as values, in a window of as many keys: an output is a row of weights, 0 where a key is dropped."""
    length, window = 64 * 9 + 10, 64
    query, key, _, gate = make(5, batch=1, heads=2, n_queries=1, n_keys=length, dtype=torch.float16)
    value = torch.eye(window, device=DEVICE, dtype=torch.float16).repeat(10, 1)[:length].expand(1, 2, -1, -1)
    inputs = Inputs(query, key, value, torch.zeros_like(gate))
    options = {"margin": margin, "impl": "triton"}
    got = attend(inputs, paged(inputs, [length], 3), window=window, **options)
    with torch.no_grad():
        near = (query, key[:, :, -window:], value[:, :, -window:], inputs.log_forget)
        right = tra.threshold_relative_attention(*near, **options)
    assert torch.equal(got > 0, right > 0)
    assert bool((got > 0).all()) == (margin == math.inf)


@pytest.mark.parametrize("impl", ["triton", "auto"])
def test_positions_beyond_two_billion(impl: str) -> None:
    """A row that has had 5 billion tokens is the row that has had as many less whole turns of its ring."""
    inputs = make(6, batch=1, heads=2, n_queries=1, n_keys=500)
    near = paged(inputs, [500], 2)
    far = [*near[:3], torch.tensor([500 + 128 * 40_000_000], device=DEVICE)]
    options = {"window": 100, "score_bound": 32.0, "impl": impl}
    assert torch.equal(attend(inputs, far, **options), attend(inputs, near, **options))


@pytest.mark.parametrize("impl", ["triton", "auto"])
def test_no_more_is_read_than_can_matter(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are forgotten hold NaN here, and would show."""
    monkeypatch.setattr(choice, "MAX_REFERENCE_KEYS", 16)
    monkeypatch.setattr(newest_first, "FIRST_MAP_KEYS", 64)
    monkeypatch.setattr(newest_first, "MAP_GROWTH", 2)
    inputs = make(7, batch=2, heads=1, n_queries=1, n_keys=256)
    inputs.log_forget.fill_(-5.0)
    pages = paged(inputs, [256, 200], 4)
    clean = attend(inputs, pages, score_bound=16.0, impl=impl)
    key, value, table, _ = pages
    for pool in (key, value):
        pool[table[:, :2].flatten().long()] = torch.nan
    assert torch.equal(attend(inputs, pages, score_bound=16.0, impl=impl), clean)
    assert attend(inputs, pages, score_bound=16.0, tolerance=0.0, impl=impl).isnan().all()


def test_the_pool_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pages laid out by head nor pages laid out by token."""
    inputs = make(8, batch=1, heads=2, kv_heads=2, n_queries=1, n_keys=100, dtype=torch.float16)
    pages = paged(inputs, [100], 2)
    right = attend(inputs, pages, impl="triton")
    pages[:2] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in pages[:2]]
    read: list[int] = []
    original = decode._launch
    monkeypatch.setattr(
        decode, "_launch", lambda tensors, *rest: read.append(tensors[1].data_ptr()) or original(tensors, *rest)
    )
    assert torch.equal(attend(inputs, pages, impl="triton"), right)
    assert read == [pages[0].data_ptr()]


def test_gradients_of_a_prompt_in_pages() -> None:
    """Not what pages are for, but no wrong number either."""
    inputs = exact_inputs(9, batch=1, n_queries=3, n_keys=100, dtype=torch.float64)
    key, value, table, lengths = paged(inputs, [100], 2)
    query, key = (x.to(DEVICE).detach().requires_grad_() for x in (inputs.query, key))
    gate = inputs.log_forget.to(DEVICE).detach()
    tra.threshold_relative_attention_paged(query, key, value, gate, table, lengths).sum().backward()
    tra.threshold_relative_attention(*inputs).sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    torch.testing.assert_close(query.grad.cpu(), inputs.query.grad)
    torch.testing.assert_close(key.grad.cpu()[table[0, 0], :, :5], inputs.key.grad[0, :, :5])


def test_when_a_window_suffices() -> None:
    """A head that forgets needs no more than a window, one that doesn't would want all, a short row has all."""
    inputs = make(10, batch=2, heads=2, n_queries=1, n_keys=400)
    inputs.log_forget[:, 0], inputs.log_forget[:, 1] = -1.0, -1e-3
    key, value, table, lengths = paged(inputs, [400, 100], 4)
    found = windows_suffice(inputs.query, key, value, inputs.log_forget, table, lengths, window=150, score_bound=16.0)
    assert found[..., 0].tolist() == [[True, False], [True, True]]


def test_registered_with_torch_library() -> None:
    inputs = make(11, batch=1, kv_heads=1, n_queries=1, n_keys=150)
    key, value, table, lengths = paged(inputs, [150], 2)
    first, last = PagedKeys(key, value, table, lengths, 40).first_turn(1)
    tensors = (inputs.query, key, value, inputs.log_forget, first, last, None)
    torch.library.opcheck(torch.ops.tra.decode.default, (*tensors, 0.25, 0.0, 0.0, 16.0, 2.0**-24, table, 40))


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    """A ring that turns: one graph for all lengths."""
    from torch._dynamo.testing import CompileCounterWithBackend

    inputs = make(12, heads=4, kv_heads=2, n_queries=1, n_keys=700)
    key, value, table, _ = paged(inputs, [700, 700], 3)
    counter = CompileCounterWithBackend("inductor")

    def step(lengths: Tensor) -> Tensor:
        return 2 * tra.threshold_relative_attention_paged(
            inputs.query, key, value, inputs.log_forget, table, lengths, window=100, score_bound=16.0, impl="triton"
        )

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    with torch.no_grad():
        for length in (1, 2, 100, 192, 193, 5000):
            lengths = torch.tensor([length, length // 2], device=DEVICE)
            assert torch.equal(compiled(lengths), step(lengths))
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_captured_in_a_cuda_graph() -> None:
    """A ring that turns under the graph."""
    inputs = make(13, heads=8, kv_heads=2, n_queries=1, n_keys=2000, width=64, dtype=torch.bfloat16)
    key, value, table, lengths = paged(inputs, [2000, 1200], 17)
    options = {"window": 1000, "score_bound": 64.0, "impl": "triton"}
    attend(inputs, [key, value, table, lengths], **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(inputs, [key, value, table, lengths], **options)
    for new in ([2000, 1200], [1, 0], [70, 1999]):
        lengths.copy_(torch.tensor(new))
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, attend(inputs, [key, value, table, lengths], **options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        (
            {"key_pages": torch.zeros(4, 2, 32, 16), "value_pages": torch.zeros(4, 2, 32, 16)},
            "multiple of 64 keys, got 32",
        ),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, r"block_table must be int32 of shape \(2, 2\)"),
        (
            {"block_table": torch.full((2, 2), 4, dtype=torch.int32)},
            r"block_table must lie in 0..3 \(the pages\), got 4",
        ),
        ({"key_lengths": torch.tensor([129, 4])}, r"must lie in 0..128 \(the table's keys\) with no window and 1 quer"),
        ({"key_lengths": torch.tensor([129, 4]), "window": 129}, "with a window of 129 and 1 queries, got 4..129"),
        ({"key_lengths": torch.tensor([-1, 4])}, "got -1..4"),
        ({"key_lengths": torch.tensor([1])}, r"key_lengths must be int32 of shape \(2,\)"),
        ({"value_pages": torch.zeros(3, 2, 64, 16)}, "value_pages must match key_pages in all but width"),
        ({"key_pages": torch.zeros(4, 2, 64, 8)}, "key_pages must share query's width"),
        (
            {"query": torch.zeros(2, 2, 129, 16), "log_forget": torch.zeros(2, 2, 129)},
            "got Tq = 129, and a table of 128",
        ),
        ({"impl": "fast"}, "unknown impl 'fast'"),
    ],
)
def test_bad_input(changes: dict[str, object], message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 2, 1, 16),
        "key_pages": torch.zeros(4, 2, 64, 16),
        "value_pages": torch.zeros(4, 2, 64, 16),
        "log_forget": torch.zeros(2, 2, 1),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "key_lengths": torch.tensor([100, 4]),
    }
    with pytest.raises(ValueError, match=message):
        tra.threshold_relative_attention_paged(**arguments | changes)  # type: ignore[arg-type]
