"""Divide a sequence into parts for the processes that share it."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tra.ops.context.transport import GroupTransport, Transport


class SequenceParts:
    """One sequence in two parts per process: process r of N has parts r and 2N - 1 - r, in this order.

    In causal order, the work of a part grows with its number, so that this gives all processes the same work. Parts are
    neighbouring tokens, and their lengths differ by at most one.

    Args:
        length: Tokens of the whole sequence, padding included; at least two per process.
        group: The processes that share it, or an object with the methods of `Transport`; all processes by default.
    """

    def __init__(self, length: int, group: dist.ProcessGroup | Transport | None = None) -> None:
        is_group = group is None or isinstance(group, dist.ProcessGroup)
        self.transport: Transport = GroupTransport(group) if is_group else group  # type: ignore[arg-type, assignment]
        self.rank, self.ranks = self.transport.rank, self.transport.ranks
        self.length, self.number = length, 2 * self.ranks
        if length < self.number:
            raise ValueError(
                f"a sequence of {length} tokens can't be shared by {self.ranks} processes: "
                f"expected at least {self.number}, two for each"
            )
        self.starts = [length * part // self.number for part in range(self.number + 1)]
        self.document_starts: Tensor | None = None
        """`[B, own_length]`: where the document of each of this process's tokens begins, see `with_documents`."""

    def with_documents(self, document_ids: Tensor) -> SequenceParts:
        """Return these parts for packed documents, of which tokens see their own alone. All processes call it.

        Args:
            document_ids: `[B, own_length]`, this process's: a document ends where the id changes.
        """
        if document_ids.ndim != 2:
            raise ValueError(f"document_ids must be [B, {self.own_length}], got {tuple(document_ids.shape)}")
        whole = self.join(document_ids, 1)
        begins = F.pad(whole[:, 1:] != whole[:, :-1], (1, 0), value=True)
        index = torch.arange(self.length, device=whole.device)
        found = copy.copy(self)
        found.document_starts = self.take(torch.where(begins, index, 0).cummax(1).values, 1)
        return found

    def size(self, part: int) -> int:
        """Return the number of tokens of a part."""
        return self.starts[part + 1] - self.starts[part]

    def owner(self, part: int) -> int:
        """Return the rank that owns a part."""
        return min(part, self.number - 1 - part)

    def parts_of(self, rank: int) -> tuple[int, int]:
        """Return the parts of a rank, the older one first."""
        return rank, self.number - 1 - rank

    @property
    def own_length(self) -> int:
        """Number of tokens of this process."""
        return sum(self.size(part) for part in self.parts_of(self.rank))

    def own_slices(self) -> dict[int, slice]:
        """Return the slice of each part of this process within its own tokens."""
        low, high = self.parts_of(self.rank)
        return {low: slice(0, self.size(low)), high: slice(self.size(low), self.own_length)}

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this process's tokens of a tensor that has all tokens along `dim`."""
        if tensor.shape[dim] != self.length:
            raise ValueError(f"expected {self.length} tokens along dimension {dim}, got shape {tuple(tensor.shape)}")
        parts = [tensor.narrow(dim, self.starts[p], self.size(p)) for p in self.parts_of(self.rank)]
        return torch.cat(parts, dim)

    @torch.no_grad()
    def join(self, tensor: Tensor, dim: int) -> Tensor:
        """Return all tokens of a tensor that has this process's tokens along `dim`. Without gradients."""
        self.check_own(tensor.shape[dim])
        longest = max(self.size(part) for part in range(self.number))
        own = tensor.detach().movedim(dim, 0)
        padded = own.new_zeros(2, longest, *own.shape[1:])
        for place, rows in zip(padded, self.own_slices().values(), strict=True):
            place[: rows.stop - rows.start] = own[rows]
        gathered = self.transport.all_gather(padded)()  # [ranks, 2, longest, ...]
        parts = [gathered[self.owner(p), int(p >= self.ranks), : self.size(p)] for p in range(self.number)]
        return torch.cat(parts).movedim(0, dim)

    def check_own(self, length: int) -> None:
        """Raise a ValueError if a tensor's length is not the number of this process's tokens."""
        if length != self.own_length:
            raise ValueError(
                f"process {self.rank} of {self.ranks} has {self.own_length} of {self.length} tokens, got {length}"
            )
