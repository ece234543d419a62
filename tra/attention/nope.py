"""No positions at all (Kazemnejad et al. 2023): causal softmax attention, which can count by itself."""

from __future__ import annotations

from torch import Tensor

from tra.attention._base import Attention, softmax_attention


class NoPositionAttention(Attention):
    """Plain causal softmax attention. Arguments as for `Attention`."""

    def attend(
        self,
        x: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> Tensor:
        return softmax_attention(query, key, value, key_mask, document_ids, self.dropout if self.training else 0.0)
