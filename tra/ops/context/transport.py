"""Exchange tensors between processes that share a sequence. Both calls return a waiting function at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
"""Its name since torch 2.13, and the one before; neither in a torch without distributed."""


class Message(NamedTuple):
    """A tensor to send to another rank, or to fill from there."""

    tensor: Tensor  # contiguous
    peer: int


class Transport(Protocol):
    """The exchanges that `context_parallel_attention` needs. All ranks make the same calls in the same order."""

    rank: int
    ranks: int

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        """Send and receive, at most one message each way between two ranks."""

    def all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return all ranks' tensors of one shape, stacked, once waited for."""


class GroupTransport:
    """A group of `torch.distributed`. Its timeout says how long to wait for a lost process."""

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
            operations.clear()  # keeps what is sent alive until here

        return wait

    def all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        gathered = torch.empty(self.ranks, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        sent = tensor[None].contiguous()
        work = _all_gather(gathered, sent, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            assert len(sent) == 1  # keeps what is sent alive until here
            return gathered

        return wait
