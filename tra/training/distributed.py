"""A run over several processes, as `torchrun` starts them: each takes its rows of every batch.

A gradient is the sum of the processes' gradients of one loss, which is divided by the count of the whole batch. So the
loss curve is that of a single process, but for the order of summation.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tra.config import TrainConfig

Result = TypeVar("Result")

BUCKET_BYTES = 2**25
"""Bytes of gradients that are sent at a time, about."""

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

    def check_batch(self, train: TrainConfig) -> None:
        """Refuse a batch that can't be divided among the processes."""
        if train.batch_size % (self.world * train.accumulate):
            raise ValueError(
                f"a batch of {train.batch_size} can't be dealt to {self.world} processes in {train.accumulate} pieces "
                "each: train.batch_size must be a multiple of both"
            )

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add up tensors of one dtype over all processes, in place. Only where there are others."""
        with _explain_lost_rank():
            bucket: list[Tensor] = []
            size = 0
            for index, tensor in enumerate(tensors):
                bucket.append(tensor)
                size += tensor.numel() * tensor.element_size()
                if size >= BUCKET_BYTES or index == len(tensors) - 1:
                    flat = torch.cat([part.flatten() for part in bucket])
                    dist.all_reduce(flat)
                    parts = flat.split([part.numel() for part in bucket])
                    for target, part in zip(bucket, parts, strict=True):
                        target.copy_(part.view_as(target))
                    bucket, size = [], 0

    def any_true(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        if not self.has_others:
            return flag
        flags = torch.tensor([int(flag)])
        with _explain_lost_rank():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.control)
        return bool(flags.item())

    def from_first(self, value: Any) -> Any:
        """Return the first process's value, in every process."""
        if not self.has_others:
            return value
        values = [value]
        with _explain_lost_rank():
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

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
        with _explain_lost_rank():
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
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        ranks.control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        yield ranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def local_device(device: torch.device) -> torch.device:
    """Return the GPU of this process, where `torchrun` started one process per GPU."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


def is_first() -> bool:
    """Return whether this is the first process, also before the processes are connected."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _explain_lost_rank() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower() and "closed" not in str(error):
            raise
        raise RankLostError("another process of the run has ended") from None
