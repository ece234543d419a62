"""FlexAttention, for logits that are a function of score and positions: fused where it is compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tra.attention.shared.inputs import AttentionInputs
from tra.ops.compiler_workarounds import FLEX_LENGTH_MULTIPLE

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Score, batch, head, query and key -> logit."""


def can_use_flex(inputs: AttentionInputs, dropout: float) -> bool:
    """Return whether FlexAttention takes these inputs.

    Uncompiled it holds whole maps, it has no dropout, and padding and documents would need masks of their own.
    """
    unmasked = inputs.key_mask is None and inputs.document_ids is None and inputs.cache is None
    fits = inputs.query.is_cuda and inputs.query.shape[2] % FLEX_LENGTH_MULTIPLE == 0 and dropout == 0
    return unmasked and fits and torch.compiler.is_compiling()


def flex_softmax_attention(inputs: AttentionInputs, logit: ScoreFunction) -> Tensor:
    """Run causal softmax attention over `logit(score, …)`. Rows of -inf throughout give 0."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # slow to import

    length = inputs.query.shape[2]

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, length, length, device=inputs.query.device.type)
    out = flex_attention(inputs.query, inputs.key, inputs.value, logit, mask, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out
