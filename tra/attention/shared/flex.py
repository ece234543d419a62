"""FlexAttention, for logits that are a function of score and places: fused, where it is compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tra.attention.shared.base import Given
from tra.ops.compiler_workarounds import FLEX_LENGTH_MULTIPLE

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Score, batch, head, query and key -> logit."""


def flex_fits(given: Given, dropout: float) -> bool:
    """Uncompiled it holds whole maps, it has no dropout, and padding and documents would need masks of their own."""
    plain = given.key_mask is None and given.document_ids is None and given.cache is None
    fits = given.query.is_cuda and given.query.shape[2] % FLEX_LENGTH_MULTIPLE == 0 and dropout == 0
    return plain and fits and torch.compiler.is_compiling()


def flex_softmax_attention(given: Given, logit: ScoreFunction) -> Tensor:
    """Causal softmax attention over `logit(score, …)`. Rows of -inf throughout are 0."""
    length = given.query.shape[2]

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, length, length, device=given.query.device.type)
    out = flex_attention(given.query, given.key, given.value, logit, mask, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out
