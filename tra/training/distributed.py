"""One run over several processes, as `torchrun` starts them: each takes its rows of every batch.

A gradient is the sum of the ranks' gradients of one loss, divided by what the whole batch counts, so that a run has the
loss curve of a single process but for the order of summation.
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
"""Gradients are sent in pieces of about this size."""


class RankLostError(Exception):
    """Another process of the run has ended, or can't be reached."""


class Ranks:
    """The processes of a run, and which of them this is."""

    def __init__(self, rank: int = 0, world: int = 1, local: int = 0) -> None:
        self.rank, self.world, self.local = rank, world, local
        self.control: Any = None  # a group for words between hosts, beside the one for gradients

    @property
    def first(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.world > 1

    def rows(self, whole: Tensor) -> Tensor:
        """This process's part of a batch."""
        each = len(whole) // self.world
        return whole[self.rank * each : (self.rank + 1) * each]

    def check(self, train: TrainConfig) -> None:
        """Whether a batch can be dealt out."""
        if train.batch_size % (self.world * train.accumulate):
            raise ValueError(
                f"a batch of {train.batch_size} can't be dealt to {self.world} processes in {train.accumulate} pieces "
                "each: train.batch_size must be a multiple of both"
            )

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add up tensors of one kind over all processes, in place."""
        if not self.several:
            return
        with _clear():
            bucket: list[Tensor] = []
            held = 0
            for index, tensor in enumerate(tensors):
                bucket.append(tensor)
                held += tensor.numel() * tensor.element_size()
                if held >= BUCKET_BYTES or index == len(tensors) - 1:
                    _sum_together(bucket)
                    bucket, held = [], 0

    def agree(self, flag: bool) -> bool:
        """Whether any process says so."""
        if not self.several:
            return flag
        said = torch.tensor([int(flag)])
        with _clear():
            dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.control)
        return bool(said.item())

    def from_first(self, value: Any) -> Any:
        """What the first process has, for all."""
        if not self.several:
            return value
        box = [value]
        with _clear():
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def done_by_first(self, work: Callable[[], Result]) -> Result:
        """Done once, and what came of it for all. If it fails, the first process says why and the others just end."""
        failure: Exception | None = None
        result: Any = None
        if self.first:
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
        """Make tensors the first process's."""
        if not self.several:
            return
        with _clear():
            for tensor in tensors:
                if tensor.device.type == "cpu":
                    dist.broadcast(tensor, src=0, group=self.control)
                else:
                    dist.broadcast(tensor, src=0)


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The processes that `torchrun` started, joined for a while; a single one without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    ranks = Ranks(int(os.environ["RANK"]), world, int(os.environ.get("LOCAL_RANK", "0")))
    wait = datetime.timedelta(minutes=10)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=wait)
    try:
        ranks.control = dist.new_group(backend="gloo", timeout=wait)
        yield ranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def local_device(device: torch.device) -> torch.device:
    """The GPU of this process, where there are several of both."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


def is_first() -> bool:
    """Before the processes are joined."""
    return os.environ.get("RANK", "0") == "0"


def _sum_together(tensors: Sequence[Tensor]) -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


@contextmanager
def _clear() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower() and "closed" not in str(error):
            raise
        raise RankLostError("another process of the run has ended") from None
