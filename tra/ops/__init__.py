"""The operator: what threshold relative attention computes, and how fast."""

from tra.ops.api import (
    IMPLEMENTATIONS,
    attention_map,
    threshold_relative_attention,
    threshold_relative_attention_varlen,
)
from tra.ops.full_map import AttentionMap
from tra.ops.paged import threshold_relative_attention_paged

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionMap",
    "attention_map",
    "threshold_relative_attention",
    "threshold_relative_attention_paged",
    "threshold_relative_attention_varlen",
]
