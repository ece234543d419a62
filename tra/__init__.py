"""Threshold Relative Attention: a decoder trained on short sequences that keeps working on long ones."""

from tra.attention import Cache, ThresholdRelativeAttention
from tra.model import Decoder, DecoderConfig
from tra.ops import threshold_relative_attention, threshold_relative_attention_varlen

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "Decoder",
    "DecoderConfig",
    "ThresholdRelativeAttention",
    "__version__",
    "threshold_relative_attention",
    "threshold_relative_attention_varlen",
]
