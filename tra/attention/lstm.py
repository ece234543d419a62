"""Long short-term memory (Hochreiter & Schmidhuber 1997): the recurrent baseline, in place of a whole block."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tra.attention.shared.base import Mechanism
from tra.attention.shared.cache import LayerCache
from tra.attention.shared.inputs import check_masks


class LongShortTermMemory(Mechanism):
    """One layer, projected back to d_model. Its width gives it as many parameters as attention and MLP together.

    Args:
        d_model: Width of the input and the output.
        dropout: Rate on the hidden state that is read, in training.
        n_heads, n_kv_heads, qk_norm, rotary, rope_theta, fuse_projections: For the common signature only.
    """

    replaces_mlp: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        n_kv_heads: int | None = None,
        *,
        qk_norm: bool | None = None,
        rotary: bool | None = None,
        rope_theta: float = 0.0,
        dropout: float = 0.0,
        fuse_projections: bool = False,
    ) -> None:
        super().__init__()
        if qk_norm or rotary:
            raise ValueError("lstm has no queries and keys: qk_norm and rotary don't go with it")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
        self.dropout = dropout
        self.recurrence = nn.LSTM(d_model, matching_width(d_model), batch_first=True)
        self.o_proj = nn.Linear(self.recurrence.hidden_size, d_model)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        cache: LayerCache | None = None,
        document_ids: Tensor | None = None,
        with_map: bool = False,
    ) -> Tensor:
        """Return the output, `[B, T, d_model]` -> the same. The cache has the state, which padding doesn't change."""
        if with_map:
            raise ValueError("LongShortTermMemory has no attention map")
        if document_ids is not None:
            raise ValueError("lstm reads one document per row: document_ids are for attention")
        past = 0 if cache is None else cache.length
        check_masks(x, key_mask, past, None)
        state = None
        if cache is not None and "hidden" in cache.state:
            cache.check_batch(len(x), cache.state["hidden"])
            state = cache.state["hidden"].transpose(0, 1), cache.state["cell"].transpose(0, 1)
        if key_mask is None:
            read, (hidden, cell) = self.recurrence(x, state)
        else:
            read, (hidden, cell) = self._without_padding(x, key_mask[:, past:], state)
        if cache is not None:
            cache.advance(x.shape[1], hidden=hidden.transpose(0, 1), cell=cell.transpose(0, 1))
        return self.o_proj(F.dropout(read, self.dropout, self.training))

    def _without_padding(
        self, x: Tensor, real: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run real tokens alone: move them to the front, and their outputs back."""
        order = (~real).int().argsort(dim=1, stable=True)
        lengths = real.sum(1)
        front = x.gather(1, order[..., None].expand_as(x))
        packed = pack_padded_sequence(front, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        read, new = self.recurrence(packed, state)
        read, _ = pad_packed_sequence(read, batch_first=True, total_length=x.shape[1])
        has_tokens = (lengths > 0)[None, :, None]  # rows of padding alone keep their state
        old = state if state is not None else tuple(torch.zeros_like(y) for y in new)
        hidden, cell = (torch.where(has_tokens, y, z) for y, z in zip(new, old, strict=True))
        return read.gather(1, order.argsort(dim=1)[..., None].expand_as(read)), (hidden, cell)


def matching_width(d_model: int) -> int:
    """Return the width h whose number of parameters is nearest to a block's, 10 d² + 7 d.

    Gates have 4 h (d + h) + 8 h, the projection has h d + d.
    """
    linear = 5 * d_model + 8
    return round((-linear + (linear**2 + 16 * (10 * d_model**2 + 6 * d_model)) ** 0.5) / 8)
