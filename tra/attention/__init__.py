"""Mechanisms: TRA and its rivals, one file each, all with the same projections, cache and signature."""

from tra.attention._base import Attention
from tra.attention._cache import Cache, LayerCache
from tra.attention.nope import NoPositionAttention
from tra.attention.rope import RotaryAttention
from tra.attention.tra import ThresholdRelativeAttention

MECHANISMS: dict[str, type[Attention]] = {
    "tra": ThresholdRelativeAttention,
    "rope": RotaryAttention,
    "nope": NoPositionAttention,
}

__all__ = [
    "MECHANISMS",
    "Attention",
    "Cache",
    "LayerCache",
    "NoPositionAttention",
    "RotaryAttention",
    "ThresholdRelativeAttention",
]
