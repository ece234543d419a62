"""No positions at all (Kazemnejad et al. 2023): causal softmax attention, which can count by itself."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tra.attention.shared.base import Attention, Given, softmax_attention


class NoPositionAttention(Attention):
    """Plain causal softmax attention. Arguments as for `Attention`."""

    takes_key_lengths: ClassVar[bool] = True

    def attend(self, given: Given) -> Tensor:
        return softmax_attention(given, self.dropout_now)
