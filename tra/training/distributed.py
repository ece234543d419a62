"""The processes of a run, as `torchrun` starts them: what they tell each other, and what if one ends."""

from __future__ import annotations

import datetime
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tra.config import TrainConfig

Result = TypeVar("Result")

TIMEOUT = datetime.timedelta(minutes=10)
"""Time without an answer after which another process counts as lost."""


class RankLostError(Exception):
    """Another process of the run has ended, or can't be reached."""


class Ranks:
    """The processes of a run, and which of them this is. Alone by default."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        self.is_first = rank == 0  # the process that writes files and reports progress
        self.has_others = world > 1
        self.control: Any = None  # a group for small messages between CPUs, beside the one for gradients

    def check(self, train: TrainConfig) -> None:
        """Raise a ValueError for a config that doesn't fit the number of processes."""
        if self.has_others and train.parallel == "none":
            raise ValueError(
                f"train.parallel=none trains in one process, but torchrun started {self.world}: "
                "set train.parallel=ddp or fsdp"
            )
        sharing = self.sharing(train)
        if self.world % sharing:
            raise ValueError(
                f"train.context_parallel={sharing} needs a multiple of {sharing} processes, "
                f"torchrun started {self.world}"
            )
        takers = self.world // sharing
        if train.batch_size % (takers * train.accumulate):
            to = f"{takers} processes" if sharing == 1 else f"{takers} groups of {sharing} processes"
            raise ValueError(
                f"a batch of {train.batch_size} can't be dealt to {to} in {train.accumulate} pieces "
                "each: train.batch_size must be a multiple of both"
            )

    def sharing(self, train: TrainConfig) -> int:
        """Return how many processes share each row: as many as asked for, or all where there are fewer."""
        return min(train.context_parallel, self.world)

    def add_up(self, tensor: Tensor) -> None:
        """Add up a tensor over all processes, in place."""
        if self.has_others:
            dist.all_reduce(tensor)

    def any_true(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        if not self.has_others:
            return flag
        flags = torch.tensor([int(flag)])
        with explain_lost_rank():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.control)
        return bool(flags.item())

    def from_first(self, value: Any) -> Any:
        """Return the first process's value, in every process."""
        if not self.has_others:
            return value
        values = [value]
        with explain_lost_rank():
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in every process."""
        if not self.has_others:
            return [value]
        values = [None] * self.world
        with explain_lost_rank():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def run_on_first(self, work: Callable[[], Result]) -> Result:
        """Do work in the first process and return its result in all. If it fails, only the first says why."""
        failure: Exception | None = None
        result: Any = None
        if self.is_first:
            try:
                result = work()
            except Exception as error:
                failure = error
        failed, result = self.from_first((failure is not None, result))
        if failure is not None:
            raise failure
        if failed:
            raise SystemExit(1)
        return result

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with the first process's."""
        with explain_lost_rank():
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=self.control if tensor.device.type == "cpu" else None)


@contextmanager
def join_processes(device: torch.device) -> Iterator[Ranks]:
    """Connect the processes that `torchrun` started until the end of the context; without it there is one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    ranks = Ranks(int(os.environ["RANK"]), world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    shared = next(rendezvous("env://", timeout=TIMEOUT))[0]
    try:
        with explain_lost_rank():
            store = meet(shared, ranks.rank, world)
        try:
            dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=world, timeout=TIMEOUT)
            ranks.control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        except RuntimeError as error:  # also of a wrong GLOO_SOCKET_IFNAME, or a host name that can't be resolved
            why = re.sub(r"^\[.*?\] ", "", str(error).strip().splitlines()[-1])  # the place in gloo's code
            raise ValueError(f"the processes of the run can't be connected: {why}") from None
        yield ranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def meet(store: Store, rank: int, world: int, timeout: datetime.timedelta = TIMEOUT) -> Store:
    """Wait for all processes of this start, and return a part of the store that only they use.

    When `torchrun` restarts processes, they find their predecessors' entries in its store. A process that took a dead
    one's address from there would wait for it for ever (pytorch/pytorch#135712). So the first process names each start
    by a number it draws, and a process that read the name of an earlier start isn't among those who met there.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("tra/start", own)
        others = [f"tra/{own}/{other}" for other in range(1, world)]
        try:
            store.wait(others, timeout)
        except dist.DistStoreError:
            raise RankLostError(_not_met(timeout)) from None
        store.set(f"tra/{own}/all", " ".join(store.get(other).decode() for other in others))
        return PrefixStore(f"tra/{own}", store)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if store.check(["tra/start"]):
            start = store.get("tra/start").decode()
            store.set(f"tra/{start}/{rank}", own)
            if store.check([f"tra/{start}/all"]) and own in store.get(f"tra/{start}/all").decode().split():
                return PrefixStore(f"tra/{start}", store)
        time.sleep(0.1)
    raise RankLostError(_not_met(timeout))


def _not_met(timeout: datetime.timedelta) -> str:
    return f"not all processes of the run have started within {timeout.total_seconds():g} s"


def local_device(device: torch.device) -> torch.device:
    """Return the GPU of this process, where `torchrun` started one process per GPU."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


def is_first() -> bool:
    """Return whether this is the first process, also before the processes are connected."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def explain_lost_rank() -> Iterator[None]:
    """Turn the error of an exchange whose other end is gone into a RankLostError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower() and "closed" not in str(error):
            raise
        raise RankLostError("another process of the run has ended") from None
