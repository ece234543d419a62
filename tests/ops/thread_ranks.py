"""Ranks as threads of one process, of which one runs at a time: Triton's interpreter can't have two."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tra.ops.context.transport import Message


class Threads:
    """What the threads share."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.turn = threading.Condition()  # held by the thread that runs
        self.sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.gathered: dict[int, dict[int, Tensor]] = defaultdict(dict)
        self.failed = False

    def until(self, ready: Callable[[], bool]) -> None:
        """Let other threads run until something is there."""
        self.turn.notify_all()
        if not self.turn.wait_for(lambda: ready() or self.failed, timeout=120) or self.failed:
            raise RuntimeError("another rank has ended")


class ThreadTransport:
    """A `Transport` between threads, which counts what is received."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.ranks = threads, rank, threads.ranks
        self.exchanges = self.received_bytes = self.gathers = 0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        self.exchanges += 1
        for message in sends:
            assert message.tensor.is_contiguous()
            self.threads.sent[self.rank, message.peer].append(message.tensor.clone())

        def wait() -> None:
            for message in receives:
                queue = self.threads.sent[message.peer, self.rank]
                self.threads.until(lambda queue=queue: bool(queue))  # type: ignore[misc]
                sent = queue.popleft()
                assert sent.shape == message.tensor.shape
                message.tensor.copy_(sent)
                self.received_bytes += sent.numel() * sent.element_size()

        return wait

    def all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        found = self.threads.gathered[self.gathers]
        self.gathers += 1
        found[self.rank] = tensor.clone()

        def wait() -> Tensor:
            self.threads.until(lambda: len(found) == self.ranks)
            return torch.stack([found[rank] for rank in range(self.ranks)])

        return wait


def run_ranks(ranks: int, work: Callable[[ThreadTransport], Any]) -> list[Any]:
    """Return what each rank returns."""
    threads = Threads(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        with threads.turn:
            try:
                results[rank] = work(ThreadTransport(threads, rank))
            except BaseException as error:
                errors.append(error)
                threads.failed = True
            threads.turn.notify_all()

    started = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return results
