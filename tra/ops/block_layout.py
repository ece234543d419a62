"""How the blockwise walk divides its inputs: blocks of queries, blocks of keys, and which of them meet."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.ops.inputs import compute_dtype


def key_block_size(device: torch.device) -> int:
    """Return the keys of a block: what fits the cache of a CPU core; more elsewhere, where each call costs more."""
    return 256 if device.type == "cpu" else 512


def query_block_size(device: torch.device, n_queries: int) -> int:
    """Return the queries of a block: as many as keys, or all if there are few."""
    return min(key_block_size(device), -(-n_queries // 16) * 16)


class Walk(NamedTuple):
    """One block of queries: its rows, and the key blocks it may visit, from `newest` down to `oldest`."""

    rows: slice
    newest: int
    oldest: int
    whole_from: int  # key blocks in whole_from..whole_to are seen by every row: no mask needed
    whole_to: int


class RowBlock(NamedTuple):
    """A block of queries with all that belongs to a row, each `[n, R, ...]`; n heads of keys."""

    query: Tensor
    log_forget: Tensor
    first: Tensor  # first and last visible key; rows that only fill the block see nothing
    last: Tensor
    numbers: Tensor  # number of (batch, head, query), for dropout

    def select(self, heads: Tensor | slice) -> RowBlock:
        return RowBlock(*(x[heads] for x in self))


class Layout:
    """Blocks `[N, R, ·]`: N = batch × key heads, R = queries of the block × heads that share a key head."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, first: Tensor, last: Tensor) -> None:
        self.batch, self.heads, self.n_queries, self.width = query.shape
        self.kv_heads, self.n_keys, self.value_width = key.shape[1], key.shape[2], value.shape[3]
        self.group = self.heads // self.kv_heads
        self.n = self.batch * self.kv_heads
        self.key_block = key_block_size(query.device)
        self.query_block = query_block_size(query.device, self.n_queries)
        self.dtype = compute_dtype(query.dtype)
        self.first, self.last = first, last
        self.key_padding = -self.n_keys % self.key_block

    def walks(self) -> list[Walk]:
        count = -(-self.n_queries // self.query_block)
        padding = count * self.query_block - self.n_queries
        # The device is read once for all blocks; rows of padding repeat the last query's range.
        first = F.pad(self.first[None].double(), (0, padding), "replicate")[0].view(-1, count, self.query_block)
        last = F.pad(self.last[None].double(), (0, padding), "replicate")[0].view(-1, count, self.query_block)
        ends = torch.stack([last.amax((0, 2)), first.amin((0, 2)), first.amax((0, 2)), last.amin((0, 2))])
        return [
            Walk(
                rows=slice(index * self.query_block, min((index + 1) * self.query_block, self.n_queries)),
                newest=highest_last // self.key_block,
                oldest=lowest_first // self.key_block,
                whole_from=-(-highest_first // self.key_block),
                whole_to=(lowest_last + 1) // self.key_block - 1,
            )
            for index, (highest_last, lowest_first, highest_first, lowest_last) in enumerate(ends.long().T.tolist())
        ]

    def keys_of(self, index: int) -> slice:
        """Return the keys of a block, as a slice."""
        return slice(index * self.key_block, (index + 1) * self.key_block)

    def key_numbers(self, index: int) -> Tensor:
        """Return the keys of a block, as numbers."""
        return torch.arange(index * self.key_block, (index + 1) * self.key_block, device=self.first.device)

    def take(self, tensor: Tensor, rows: slice) -> Tensor:
        """Return rows of `[B, H, Tq, ...]` as `[N, R, ...]`, zero-filled to a whole block."""
        part = tensor[:, :, rows].to(self.dtype)
        missing = self.query_block - part.shape[2]
        if missing:
            part = F.pad(part, (0, 0) * (part.ndim - 3) + (0, missing))
        return part.reshape(self.n, self.group * self.query_block, *part.shape[3:])

    def put(self, tensor: Tensor, rows: slice, part: Tensor) -> None:
        """Write what `take` would return into a tensor."""
        part = part.reshape(self.batch, self.heads, self.query_block, *part.shape[2:])
        tensor[:, :, rows] = part[:, :, : rows.stop - rows.start].to(tensor.dtype)

    def row_block(self, rows: slice, query: Tensor, log_forget: Tensor) -> RowBlock:
        missing = self.query_block - (rows.stop - rows.start)
        first = F.pad(self.first[:, rows], (0, missing), value=0)
        last = F.pad(self.last[:, rows], (0, missing), value=-1)
        shape = (self.batch, self.kv_heads, self.group, self.query_block)
        first, last = (x[:, None, None].expand(shape).reshape(self.n, -1) for x in (first, last))
        heads = torch.arange(self.batch * self.heads, device=first.device) * self.n_queries
        queries = torch.arange(rows.start, rows.start + self.query_block, device=first.device)
        numbers = (heads[:, None] + queries).view(self.n, -1)
        return RowBlock(self.take(query, rows), self.take(log_forget, rows), first, last, numbers)

    def flat_keys(self, tensor: Tensor) -> Tensor:
        """Return `[B, Hkv, Tk, ·]` as `[N, Tk, ·]`, Tk zero-filled to whole blocks."""
        return F.pad(tensor, (0, 0, 0, self.key_padding)).reshape(self.n, -1, tensor.shape[3])
