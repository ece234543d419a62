"""One sequence over several ranks: the result and gradients of one process, and what is not sent.

Quick tests have ranks that are threads. `test_context_processes.py` has processes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import tra
from tests.ops import context_cases as cases
from tests.ops.compare import Inputs, exact_inputs
from tests.ops.context_cases import CASES, ENDINGS, NANS, Case, Shared
from tests.ops.thread_ranks import ThreadTransport, run_ranks
from tests.slow import slow
from tra.ops import SequenceParts, context_parallel_attention
from tra.ops.context import schedule
from tra.ops.context.schedule import Schedule, segments_before
from tra.ops.triton import launch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy")

QUICK = ("odd", "padding in between, margin", "half", "documents")


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SMALLEST_SEGMENT", cases.SEGMENT)


def run_threads(ranks: int, case: Case, impl: str = "blockwise") -> list[Shared]:
    return run_ranks(ranks, lambda transport: cases.run_shared(case, transport, impl))


class Ranks:
    """A transport that only has numbers, for what needs no messages."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in CASES if name not in QUICK))])
def test_three_ranks(name: str) -> None:
    cases.check_rule(CASES[name], run_threads(3, CASES[name]))


def test_one_rank() -> None:
    cases.check_rule(CASES["odd"], run_threads(1, CASES["odd"]))


def test_two_runs_have_the_same_bits() -> None:
    first, second = (run_threads(3, CASES["margin"])[0].tensors for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", NANS)
def test_a_nan_shows(name: str) -> None:
    cases.check_nan(NANS[name], run_threads(2, NANS[name]))


KERNEL_CASES = {
    "half, promise": Case(70, heads=1, kv_heads=1, dtype=torch.float16, options={"scale": 0.125, "score_bound": 8.0}),
    "padding, margin": Case(80, heads=2, kv_heads=1, padded="left", options={"margin": 2.0}),
    "half, online": Case(80, heads=1, kv_heads=1, dtype=torch.float16, padded="middle"),
    "float, null rows": Case(150, heads=1, kv_heads=1, content="null rows"),
    "steep": Case(80, heads=1, kv_heads=1, gates=cases.STEEP, dtype=torch.float16,
                  options={"scale": 0.125, "score_bound": 8.0}),
    "infinite margin, no tolerance": Case(
        80, heads=1, kv_heads=1, dtype=torch.float16,
        options={"margin": float("inf"), "tolerance": 0.0, "scale": 0.125, "score_bound": 8.0},
    ),
    "documents": Case(90, kv_heads=1, dtype=torch.float16, documents=((5, 6, 40, 80), (33,)),
                      options={"margin": 1.0, "scale": 0.125, "score_bound": 8.0}),
    "float, documents": Case(90, kv_heads=1, documents=((7,), (16, 64))),
    "walks that stop in a piece": Case(
        280, heads=1, kv_heads=1, flattest=-3.0, dtype=torch.float16, options={"scale": 0.125, "score_bound": 8.0}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["half, promise", *slow(*(name for name in KERNEL_CASES if name != "half, promise"))])
def test_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter; walks may stop within a piece too."""
    monkeypatch.setattr(launch, "MAX_FULL_WALK_KEYS", 0)
    cases.check_rule(KERNEL_CASES[name], run_threads(2, KERNEL_CASES[name], "triton"))


@dataclass(frozen=True)
class GapCase(Case):
    """Flat gates, and padding only in the sixth of eight parts, at 70 of its 80 tokens."""

    def key_mask(self) -> Tensor:
        mask = torch.ones(1, self.length, dtype=torch.bool)
        mask[:, 400:470] = False
        return mask


@pytest.mark.slow
def test_kernels_read_on_behind_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What matters to the newest parts is four parts behind one that begins with more masked keys than a block has."""
    monkeypatch.setattr(cases, "SEGMENT", 80)
    case = GapCase(640, heads=1, kv_heads=1, content="far and strong", gates=cases.FLAT, dtype=torch.float16,
                   options={"score_bound": 64.0})  # fmt: skip
    cases.check_rule(case, run_threads(4, case, "triton"))


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_masked_keys_end_no_walk(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece may begin with whole blocks of masked keys. That its walk ends at them says nothing about older keys."""
    monkeypatch.setattr(schedule, "SMALLEST_SEGMENT", 64)
    inputs = Inputs(*(x.detach() for x in exact_inputs(0, batch=1, heads=1, n_queries=384)))
    inputs.log_forget.fill_(-1e-4)
    mask = torch.ones(1, 384, dtype=torch.bool)
    mask[:, 196:268] = False  # of the third of four parts, keys 0..71 once they are moved

    def work(transport: ThreadTransport) -> torch.Tensor:
        parts = SequenceParts(384, transport)
        own, own_mask = (parts.take(x, 2) for x in inputs), parts.take(mask, 1)
        return parts.join(context_parallel_attention(*own, parts, key_mask=own_mask, impl=impl), 2)

    exact = tra.threshold_relative_attention(*(x.double() for x in inputs), key_mask=mask, impl="reference")
    torch.testing.assert_close(run_ranks(2, work)[0].double(), exact, rtol=1e-5, atol=1e-5)


def test_a_compiled_caller_leaves_it_as_it_is() -> None:
    """A graph ends before the call, and another one begins after it."""
    inputs = [x.detach() for x in exact_inputs(0, batch=1, heads=1, n_queries=20)]

    def work(transport: ThreadTransport) -> bool:
        parts = SequenceParts(20, transport)

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            return context_parallel_attention(*(x * 1 for x in tensors), parts) * 2

        return torch.equal(torch.compile(attend, backend="eager")(*inputs), attend(*inputs))

    assert run_ranks(1, work) == [True]


def total_bytes(shared: list[Shared]) -> int:
    return sum(rank.forward.bytes for rank in shared)


def bytes_of_all_keys(ranks: int, case: Case) -> int:
    """What ranks receive if every part reads all older ones."""
    parts = SequenceParts(case.length, Ranks(0, ranks))
    keys = [
        parts.size(older)
        for part in range(parts.number)
        for older in range(part)
        if parts.owner(part) != parts.owner(older)
    ]
    return sum(keys) * 2 * case.kv_heads * 2 * 16 * case.dtype.itemsize


def test_what_is_not_sent() -> None:
    """Gates at initialisation end early; without a tolerance, and where gates are flat, every key is sent."""
    found = {name: run_threads(3, ENDINGS[name]) for name in ("early", "by norms", "never", "flat")}
    everything = bytes_of_all_keys(3, ENDINGS["never"])
    assert total_bytes(found["never"]) == everything
    assert total_bytes(found["flat"]) == everything
    assert total_bytes(found["early"]) < 0.5 * everything
    assert total_bytes(found["by norms"]) < 0.5 * everything
    assert found["early"][0].forward.exchanges < found["never"][0].forward.exchanges
    for name in ("early", "flat"):
        cases.check_rule(ENDINGS[name], found[name])


def test_other_documents_are_not_sent() -> None:
    """Parts of 160 tokens, documents of 60: the newest keys of the part before, and two segments asked for ahead."""
    case = ENDINGS["documents"]
    shared = run_threads(3, case)
    assert total_bytes(shared) < 0.4 * bytes_of_all_keys(3, case)
    cases.check_rule(case, shared)


def test_an_early_end_keeps_within_the_tolerance() -> None:
    case = ENDINGS["loose"]
    shared = run_threads(3, case)
    assert total_bytes(shared) < 0.5 * bytes_of_all_keys(3, case)
    inputs = case.inputs()
    exact = cases.run(inputs, case.grad_out(inputs), "reference", scale=0.125)[0]
    error = (shared[0].tensors[0] - exact).abs().amax()
    assert 0 < error <= 2 * 1e-3 * inputs.value.abs().amax()
    cases.check_passes_agree(shared)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_schedule_reads_every_pair_once_and_gives_all_ranks_the_same_work(ranks: int) -> None:
    parts = SequenceParts(ranks * 64, Ranks(0, ranks))
    plan = Schedule(parts, 1)
    read = [parts.size(part) * parts.starts[part] for part in range(parts.number)]
    work = [0] * ranks
    ticks = 0
    while tasks := plan.next_tasks():
        ticks += 1
        assert len({parts.owner(task.part) for task in tasks}) == len(tasks)
        for task in tasks:
            pairs = parts.size(task.part) * (task.keys.stop - task.keys.start)
            read[task.part] -= pairs
            work[parts.owner(task.part)] += pairs
    assert read == [0] * parts.number
    assert len(set(work)) == 1


def test_segments_go_back_from_the_newest_key() -> None:
    parts = SequenceParts(1200, Ranks(0, 3))
    keys = [(parts.starts[s.part] + s.start, parts.starts[s.part] + s.stop) for s in segments_before(parts, 4)]
    assert keys[0][1] == parts.starts[4]
    assert keys[-1][0] == 0
    assert all(newer[0] == older[1] for newer, older in itertools.pairwise(keys))
    assert [stop - start for start, stop in keys[:6]] == [16, 16, 16, 24, 36, 54]


@pytest.mark.parametrize("length", [6, 7, 97, 100])
def test_parts_hold_every_token_once(length: int) -> None:
    owned = [SequenceParts(length, Ranks(rank, 3)).take(torch.arange(length), 0) for rank in range(3)]
    assert torch.equal(torch.cat(owned).sort().values, torch.arange(length))
    assert max(map(len, owned)) - min(map(len, owned)) <= 2


def call(length: int = 12, **options: object) -> None:
    parts = SequenceParts(12, Ranks(0, 2))
    x = torch.zeros(1, 2, length, 8)
    context_parallel_attention(x, x, x, x[..., 0], parts, **options)  # type: ignore[arg-type]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="a sequence of 3 tokens can't be shared by 2 processes: expected at least 4"):
        SequenceParts(3, Ranks(0, 2))
    with pytest.raises(ValueError, match="process 0 of 2 has 6 of 12 tokens, got 12"):
        call(12)
    with pytest.raises(ValueError, match="unknown impl 'reference'"):
        call(6, impl="reference")
    with pytest.raises(ValueError, match=r"margin must be at least 0, got -1\.0"):
        call(6, margin=-1.0)
    with pytest.raises(ValueError, match=r"needs torch.distributed.init_process_group first"):
        SequenceParts(12)
    with pytest.raises(ValueError, match=r"expected 12 tokens along dimension 1, got shape \(1, 5\)"):
        SequenceParts(12, Ranks(0, 2)).take(torch.zeros(1, 5), 1)
