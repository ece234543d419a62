"""Rotary position embedding (Su et al. 2021), with the paper's base of 500,000."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from tra.attention.nope import NoPositionAttention
from tra.attention.shared.inputs import AttentionInputs
from tra.attention.shared.pages import attend_by_group, paged_softmax_attention


class RotaryAttention(NoPositionAttention):
    """Softmax attention whose queries and keys are rotated by an angle that grows with position. See `Attention`."""

    default_rotary: ClassVar[bool] = True
    takes_pages: ClassVar[bool] = True

    def attend(self, inputs: AttentionInputs) -> Tensor:
        if inputs.pages is not None:
            return attend_by_group(paged_softmax_attention, inputs.pages, inputs.query)
        return super().attend(inputs)
