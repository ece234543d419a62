"""How processes that share a sequence exchange tensors. Both calls return at once, with a function that waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
"""Its name since torch 2.13, and the one before; neither in a torch without distributed."""


class Message(NamedTuple):
    """A tensor that goes to another rank, or one that is to be filled from there."""

    tensor: Tensor  # contiguous
    peer: int


class Transport(Protocol):
    """What `context_parallel_attention` needs of a group of processes. All ranks make the same calls in one order."""

    rank: int
    ranks: int

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Send and receive, at most one message each way between two ranks."""

    def all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return all ranks' tensors of one shape, stacked, once waited for."""


class GroupTransport:
    """The processes of a group of `torch.distributed`; its timeout says how long a lost one is waited for."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("context parallelism needs torch.distributed.init_process_group first")
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is not in the group that shares the sequence")

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        calls = [(dist.isend, message) for message in sends] + [(dist.irecv, message) for message in receives]
        operations = [dist.P2POp(call, x.tensor, group=self.group, group_peer=x.peer) for call, x in calls]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()
            operations.clear()  # until here what is sent must not be freed

        return wait

    def all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        gathered = torch.empty(self.ranks, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        sent = tensor[None].contiguous()
        work = _all_gather(gathered, sent, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            assert len(sent) == 1  # until here what is sent must not be freed
            return gathered

        return wait
