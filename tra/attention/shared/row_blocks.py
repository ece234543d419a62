"""Mechanisms without a fused kernel: a block of query rows at a time, so that no whole map is ever held."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tra.attention.shared.base import Attention, Given
from tra.ops.compiler_workarounds import softmax_or_nothing

MOST_ENTRIES = {"cpu": 2**24, "cuda": 2**26}
"""Entries of the map `[B, H, rows, Tk]` that are computed at once."""


class DenseAttention(Attention):
    """Attention whose `logits` and `weigh` are all there is. In training, blocks but the only one are recomputed."""

    def prepare(self, given: Given) -> Given:
        """Fill in `prepared`, where all rows need the same; the place to touch a cache."""
        return given

    def attend(self, given: Given) -> Tensor:
        given = self.prepare(given)

        def read(rows: Tensor) -> Tensor:
            weights = F.dropout(self.weigh(self.logits(given, rows)), self.dropout_now)
            value = given.value.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
            return weights.to(value.dtype) @ value  # [B, H, R, Tk] @ [B, H, Tk, D]

        return by_rows(read, given)

    def weigh(self, logits: Tensor) -> Tensor:
        return softmax_or_nothing(logits)


def rows_at_once(given: Given) -> int:
    """Query rows whose maps stay within MOST_ENTRIES."""
    batch, heads, _, _ = given.query.shape
    return max(1, MOST_ENTRIES.get(given.query.device.type, 2**24) // (batch * heads * given.key.shape[2]))


def by_rows(read: Callable[[Tensor], Tensor], given: Given) -> Tensor:
    """`read` over blocks of rows, joined: `[B, H, Tq, D]`."""
    blocks = torch.arange(given.query.shape[2], device=given.query.device).split(rows_at_once(given))
    if len(blocks) == 1:
        return read(blocks[0])
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(read, rows, use_reentrant=False) for rows in blocks], dim=2)
    return torch.cat([read(rows) for rows in blocks], dim=2)
