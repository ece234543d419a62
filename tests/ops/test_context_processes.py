"""One sequence over two and over four processes that talk by gloo: all cases in one launch each."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ops import context_cases as cases
from tests.ops.context_cases import ALL, CASES, ENDINGS, NANS, Shared
from tra.ops import SequenceParts, context_parallel_attention
from tra.ops.context.transport import GroupTransport

pytestmark = pytest.mark.slow

TIMEOUT = datetime.timedelta(seconds=90)
SHORT = datetime.timedelta(seconds=5)


def join(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks, timeout=TIMEOUT)


def run_all(rank: int, ranks: int, folder: Path, found: Connection) -> None:
    """Run every case on one rank, and send what it has."""
    join(rank, ranks, folder)
    transport = GroupTransport()
    for name, case in ALL.items():
        shared = cases.run_shared(case, transport)
        found.send((name, Shared([x.numpy(force=True) if x.dtype != torch.bfloat16 else x.float().numpy()
                                  for x in shared.tensors], shared.forward, shared.backward)))  # fmt: skip
    dist.destroy_process_group()


def attend(group: dist.ProcessGroup) -> None:
    parts = SequenceParts(64, group)
    x = torch.randn(1, 1, parts.own_length, 8)
    context_parallel_attention(x, x, x, -torch.ones(1, 1, parts.own_length), parts)


def lose_a_rank(rank: int, ranks: int, folder: Path, found: Connection) -> None:
    """Call with a rank that doesn't, and then with one that has ended; send what is raised, and after how long."""
    join(rank, ranks, folder)
    groups = [dist.new_group(timeout=limit) for limit in (SHORT, TIMEOUT)]
    attend(groups[1])
    if rank == 1:
        time.sleep(15)
        os._exit(1)
    for group in groups:
        begun = time.monotonic()
        try:
            attend(group)
        except RuntimeError as error:
            found.send((str(error), time.monotonic() - begun))
    os._exit(0)


def launch(work: Any, ranks: int, folder: Path) -> tuple[list[Connection], list[Any]]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=work, args=(rank, ranks, folder, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    return [receiver for receiver, _ in pipes], processes


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Shared]]:
    """Results of all cases by rank, received one case after the other."""
    receivers, processes = launch(run_all, request.param, tmp_path_factory.mktemp("ranks"))
    found: dict[str, list[Shared]] = {}
    for expected, case in ALL.items():
        for receiver in receivers:
            name, shared = receiver.recv()
            assert name == expected
            tensors = [torch.from_numpy(x) for x in shared.tensors]
            tensors[:4] = [x.to(case.dtype) for x in tensors[:4]]
            found.setdefault(name, []).append(shared._replace(tensors=tensors))
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0
    return found


def test_the_result_is_that_of_one_process(results: dict[str, list[Shared]]) -> None:
    for name, case in CASES.items():
        try:
            cases.check_rule(case, results[f"rule: {name}"])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_nan_shows(results: dict[str, list[Shared]]) -> None:
    for name, case in NANS.items():
        cases.check_nan(case, results[f"nan: {name}"])


def test_what_is_not_sent(results: dict[str, list[Shared]]) -> None:
    sent = {name: sum(rank.forward.bytes for rank in results[f"end: {name}"]) for name in ENDINGS}
    assert sent["never"] == sent["flat"]
    assert sent["early"] < 0.6 * sent["never"]
    assert sent["by norms"] < 0.6 * sent["never"]
    for name in ENDINGS:
        cases.check_passes_agree(results[f"end: {name}"])


def test_a_lost_rank_is_an_error(tmp_path: Path) -> None:
    """A rank that doesn't answer, by the group's timeout; one that has ended, as soon as its connection closes."""
    receivers, processes = launch(lose_a_rank, 2, tmp_path)
    for limit in (SHORT.seconds + 5, 60):
        assert receivers[0].poll(timeout=150)
        said, seconds = receivers[0].recv()
        assert said
        assert seconds < limit
    for process in processes:
        process.join(timeout=30)
        assert not process.is_alive()
