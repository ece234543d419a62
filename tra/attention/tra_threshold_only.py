"""TRA's first half alone: keys below the threshold leave the softmax, and there is no distance."""

from __future__ import annotations

from typing import ClassVar

from tra.attention.tra import ThresholdRelativeAttention


class ThresholdOnlyAttention(ThresholdRelativeAttention):
    """Softmax over the keys above `threshold - margin`, and no gate. See `ThresholdRelativeAttention`."""

    gated: ClassVar[bool] = False
    config_fields: ClassVar[tuple[str, ...]] = ("threshold", "margin")
