"""A mechanism of your own: softmax attention over the nearest keys, with the window's width as a setting.

tra train --preset flipflop-quick model.mechanism=examples/own_mechanism.py:Windowed model.arguments.window=16
tra evaluate runs/flipflop-quick-Windowed --import examples/own_mechanism.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tra.attention import AttentionInputs, DenseAttention, scores, visible_keys


class Windowed(DenseAttention):
    """Attention to the `window` nearest keys, the query's own among them."""

    def __init__(self, *common: int, window: int = 8, **others: Any) -> None:
        super().__init__(*common, **others)
        self.window = window

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        distance = (inputs.past + rows)[:, None] - torch.arange(inputs.key.shape[2], device=rows.device)
        hidden = ~visible_keys(inputs, rows) | (distance >= self.window)
        return scores(inputs, rows).masked_fill(hidden, -torch.inf)
