"""Contextual position encoding (Golovneva et al. 2024): a query counts the keys it finds relevant."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tra.attention.shared.inputs import AttentionInputs, scores, visible_keys
from tra.attention.shared.row_blocks import DenseAttention
from tra.ops.compiler_workarounds import sum_from_the_right


class ContextualPositionAttention(DenseAttention):
    """Softmax over `q_i · k_j / √D + q_i · e(p_ij)`, with `p_ij` the sum of σ(q_i · k / √D) over keys from j to i.

    Args:
        cope_positions: Number of positions with an embedding of their own (npos_max in the paper); p_ij is clamped to
            the last one, and embeddings between two are interpolated. Shared by the heads of a layer.
        options: See `Attention`.
    """

    config_fields: ClassVar[tuple[str, ...]] = ("cope_positions",)

    def __init__(
        self, d_model: int, n_heads: int, n_kv_heads: int | None = None, *, cope_positions: int = 64, **options: Any
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)
        if cope_positions < 2:
            raise ValueError(f"cope_positions must be at least 2, got {cope_positions}")
        self.embedding = nn.Parameter(torch.zeros(self.head_width, cope_positions))

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        content, visible = scores(inputs, rows), visible_keys(inputs, rows)
        gates = content.sigmoid() * visible
        position = sum_from_the_right(gates).clamp(max=self.embedding.shape[1] - 1)
        with torch.autocast(content.device.type, enabled=False):
            whole = inputs.query[:, :, rows].to(content.dtype) @ self.embedding.to(content.dtype)  # [B, H, R, npos]
        below = position.detach().floor()
        lower, upper = (whole.gather(-1, p.long()) for p in (below, position.detach().ceil()))
        share = position - below
        return (content + share * upper + (1 - share) * lower).masked_fill(~visible, -torch.inf)
