"""The operator: what threshold relative attention computes, and how fast."""

from tra.ops.api import (
    IMPLEMENTATIONS,
    attention_map,
    threshold_relative_attention,
    threshold_relative_attention_varlen,
)
from tra.ops.context.attention import context_parallel_attention
from tra.ops.context.parts import SequenceParts
from tra.ops.full_map import AttentionMap
from tra.ops.paged import threshold_relative_attention_paged

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionMap",
    "SequenceParts",
    "attention_map",
    "context_parallel_attention",
    "threshold_relative_attention",
    "threshold_relative_attention_paged",
    "threshold_relative_attention_varlen",
]
