"""Rotary position embedding (Su et al. 2021), with the paper's base of 500,000."""

from __future__ import annotations

from typing import ClassVar

from tra.attention.nope import NoPositionAttention


class RotaryAttention(NoPositionAttention):
    """Softmax attention whose queries and keys are rotated by an angle that grows with position. See `Attention`."""

    default_rotary: ClassVar[bool] = True
