"""How the blockwise walk cuts its inputs: blocks of queries, blocks of keys, and which of them meet."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.ops.inputs import compute_dtype


def key_block(device: torch.device) -> int:
    """Keys per block: what the cache of a CPU core holds; more elsewhere, where each call costs more."""
    return 256 if device.type == "cpu" else 512


def query_block(device: torch.device, n_queries: int) -> int:
    """Queries per block: as many, or all of few (decoding)."""
    return min(key_block(device), -(-n_queries // 16) * 16)


def without_padding(
    key: Tensor, value: Tensor, first: Tensor, last: Tensor, key_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Real keys to the front, in order; masked ones never count, so only the ends of each row's range move."""
    order = torch.argsort(~key_mask, dim=-1, stable=True)
    real = key_mask.gather(1, order)[:, None, :, None]
    key, value = (
        torch.where(real, tensor.gather(2, order[:, None, :, None].expand_as(tensor)), 0.0) for tensor in (key, value)
    )
    before = F.pad(key_mask.long().cumsum(-1), (1, 0))  # [B, Tk + 1]: real keys in 0..j-1
    first = before.gather(1, first)
    last = before.gather(1, (last + 1).clamp(min=0)) - 1
    return key, value, first, last


class Walk(NamedTuple):
    """One block of queries: its rows, and the key blocks it may visit, from `newest` down to `oldest`."""

    rows: slice
    newest: int
    oldest: int
    whole_from: int  # key blocks in whole_from..whole_to are seen by every row: no mask needed
    whole_to: int


class Layout:
    """Blocks of `[N, R, ·]`: N = batch × kv heads, R = queries of the block × heads that share a kv head."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, first: Tensor, last: Tensor) -> None:
        self.batch, self.heads, self.n_queries, self.width = query.shape
        self.kv_heads, self.n_keys, self.value_width = key.shape[1], key.shape[2], value.shape[3]
        self.group = self.heads // self.kv_heads
        self.n = self.batch * self.kv_heads
        self.key_block = key_block(query.device)
        self.block = query_block(query.device, self.n_queries)
        self.dtype = compute_dtype(query.dtype)
        self.first, self.last = first, last
        self.key_padding = -self.n_keys % self.key_block

    def walks(self) -> list[Walk]:
        count = -(-self.n_queries // self.block)
        padding = count * self.block - self.n_queries
        # One look at the device for all blocks; rows of padding repeat the last query's range.
        first = F.pad(self.first[None].double(), (0, padding), "replicate")[0].view(-1, count, self.block)
        last = F.pad(self.last[None].double(), (0, padding), "replicate")[0].view(-1, count, self.block)
        ends = torch.stack([last.amax((0, 2)), first.amin((0, 2)), first.amax((0, 2)), last.amin((0, 2))])
        walks = []
        for index, (highest_last, lowest_first, highest_first, lowest_last) in enumerate(ends.long().T.tolist()):
            walks.append(
                Walk(
                    rows=slice(index * self.block, min((index + 1) * self.block, self.n_queries)),
                    newest=highest_last // self.key_block,
                    oldest=lowest_first // self.key_block,
                    whole_from=-(-highest_first // self.key_block),
                    whole_to=(lowest_last + 1) // self.key_block - 1,
                )
            )
        return walks

    def columns(self, index: int) -> slice:
        return slice(index * self.key_block, (index + 1) * self.key_block)

    def column_numbers(self, index: int) -> Tensor:
        return torch.arange(index * self.key_block, (index + 1) * self.key_block, device=self.first.device)

    def take(self, tensor: Tensor, rows: slice) -> Tensor:
        """`[B, H, Tq, ...]` -> `[N, R, ...]`, zero-filled to a whole block."""
        part = tensor[:, :, rows].to(self.dtype)
        missing = self.block - part.shape[2]
        if missing:
            part = F.pad(part, (0, 0) * (part.ndim - 3) + (0, missing))
        return part.reshape(self.n, self.group * self.block, *part.shape[3:])

    def put(self, tensor: Tensor, rows: slice, part: Tensor) -> None:
        """The inverse of `take`."""
        part = part.reshape(self.batch, self.heads, self.block, *part.shape[2:])
        tensor[:, :, rows] = part[:, :, : rows.stop - rows.start].to(tensor.dtype)

    def range_of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """First and last key per row, `[N, R]`; rows that only fill the block see nothing."""
        missing = self.block - (rows.stop - rows.start)
        first = F.pad(self.first[:, rows], (0, missing), value=0)
        last = F.pad(self.last[:, rows], (0, missing), value=-1)
        shape = (self.batch, self.kv_heads, self.group, self.block)
        first, last = (x[:, None, None].expand(shape).reshape(self.n, -1) for x in (first, last))
        return first, last

    def row_numbers(self, rows: slice) -> Tensor:
        """Number of (batch, head, query) per row, `[N, R]`, for dropout."""
        device = self.first.device
        heads = torch.arange(self.batch * self.heads, device=device) * self.n_queries
        queries = torch.arange(rows.start, rows.start + self.block, device=device)
        return (heads[:, None] + queries).view(self.n, -1)

    def flat_keys(self, tensor: Tensor) -> Tensor:
        """`[B, Hkv, Tk, ·]` -> `[N, Tk, ·]`, Tk zero-filled to whole blocks."""
        return F.pad(tensor, (0, 0, 0, self.key_padding)).reshape(self.n, -1, tensor.shape[3])
