"""No positions at all (Kazemnejad et al. 2023): causal softmax attention, which can learn to count tokens."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tra.attention.shared.base import Attention
from tra.attention.shared.inputs import AttentionInputs, softmax_attention


class NoPositionAttention(Attention):
    """Plain causal softmax attention. Arguments as for `Attention`."""

    takes_key_lengths: ClassVar[bool] = True

    def attend(self, inputs: AttentionInputs) -> Tensor:
        return softmax_attention(inputs, self.dropout_now)
