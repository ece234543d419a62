"""Mechanisms without a fused kernel: a block of query rows at a time, so that no whole map is held in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tra.attention.shared.base import Attention
from tra.attention.shared.inputs import AttentionInputs
from tra.ops.compiler_workarounds import is_exporting, softmax_or_nothing

MAX_MAP_ENTRIES = {"cpu": 2**24, "cuda": 2**26}
"""Entries of the map `[B, H, rows, Tk]` that are computed at once."""


class DenseAttention(Attention):
    """Attention computed from `logits` and `weigh` alone. In training, several blocks are recomputed in backward."""

    def precompute(self, inputs: AttentionInputs) -> AttentionInputs:
        """Fill in `precomputed`, where all rows need the same. The only place to change a cache."""
        return inputs

    def attend(self, inputs: AttentionInputs) -> Tensor:
        inputs = self.precompute(inputs)

        def attend_rows(rows: Tensor) -> Tensor:
            weights = F.dropout(self.weigh(self.logits(inputs, rows)), self.dropout_now)
            value = inputs.value.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
            return weights.to(value.dtype) @ value  # [B, H, R, Tk] @ [B, H, Tk, D]

        return map_row_blocks(attend_rows, inputs)

    def weigh(self, logits: Tensor) -> Tensor:
        return softmax_or_nothing(logits)


def max_rows_at_once(inputs: AttentionInputs) -> int:
    """Return the number of query rows whose maps stay within MAX_MAP_ENTRIES."""
    batch, heads, _, _ = inputs.query.shape
    return max(1, MAX_MAP_ENTRIES.get(inputs.query.device.type, 2**24) // (batch * heads * inputs.key.shape[2]))


def row_blocks(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the indices of query rows, in blocks whose maps are computed at once.

    An exported graph has one block, because it takes any length and so can't have a fixed number of blocks.
    """
    rows = torch.arange(inputs.query.shape[2], device=inputs.query.device)
    return (rows,) if is_exporting() else rows.split(max_rows_at_once(inputs))


def map_row_blocks(attend_rows: Callable[[Tensor], Tensor], inputs: AttentionInputs) -> Tensor:
    """Call `attend_rows` on blocks of rows and join the results: `[B, H, Tq, D]`."""
    blocks = row_blocks(inputs)
    if len(blocks) == 1:
        return attend_rows(blocks[0])
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(attend_rows, rows, use_reentrant=False) for rows in blocks], dim=2)
    return torch.cat([attend_rows(rows) for rows in blocks], dim=2)
