"""Mechanisms: TRA and its rivals, one file each, all with the same projections, cache and signature.

A mechanism of your own is a subclass of `Attention` with `attend`, `logits` and `weigh`, or of `DenseAttention` with
`logits` and `weigh`. These methods take `AttentionInputs`; `scores`, `visible_keys`, `key_positions` and
`softmax_attention` help to write them. Constructor arguments that other mechanisms don't have are set by
`model.arguments` of a run. `examples/own_mechanism.py` is an example. `tra.import_file` registers the mechanisms of a
file.
"""

from tra.attention.alibi import LinearBiasAttention
from tra.attention.cope import ContextualPositionAttention
from tra.attention.differential import DifferentialAttention
from tra.attention.entmax import EntmaxAttention
from tra.attention.forgetting import ForgettingAttention
from tra.attention.lstm import LongShortTermMemory
from tra.attention.nope import NoPositionAttention
from tra.attention.rope import RotaryAttention
from tra.attention.selective import SelectiveAttention
from tra.attention.shared.arguments import constructor_arguments
from tra.attention.shared.base import Attention, Mechanism, WeightMap
from tra.attention.shared.bounded_cache import BoundedCache
from tra.attention.shared.cache import Cache, LayerCache, StaticCache
from tra.attention.shared.inputs import AttentionInputs, key_positions, scores, softmax_attention, visible_keys
from tra.attention.shared.row_blocks import DenseAttention
from tra.attention.sinusoidal import SinusoidalAttention
from tra.attention.ssmax import ScalableSoftmaxAttention
from tra.attention.stickbreaking import StickBreakingAttention
from tra.attention.tra import ThresholdRelativeAttention
from tra.attention.tra_distance_only import DistanceOnlyAttention
from tra.attention.tra_plain_distance import PlainDistanceAttention
from tra.attention.tra_threshold_only import ThresholdOnlyAttention

MECHANISMS: dict[str, type[Mechanism]] = {
    "tra": ThresholdRelativeAttention,
    "rope": RotaryAttention,
    "cope": ContextualPositionAttention,
    "forgetting": ForgettingAttention,
    "nope": NoPositionAttention,
    "sinusoidal": SinusoidalAttention,
    "alibi": LinearBiasAttention,
    "stickbreaking": StickBreakingAttention,
    "selective": SelectiveAttention,
    "differential": DifferentialAttention,
    "ssmax": ScalableSoftmaxAttention,
    "entmax": EntmaxAttention,
    "tra-threshold-only": ThresholdOnlyAttention,
    "tra-distance-only": DistanceOnlyAttention,
    "tra-plain-distance": PlainDistanceAttention,
    "lstm": LongShortTermMemory,
}
"""Mechanisms by name. Your own are added by `tra.import_file`, or when a config first names them."""

BUILT_IN_MECHANISMS = tuple(MECHANISMS)
"""Names of the mechanisms that come with this package."""

__all__ = [
    "BUILT_IN_MECHANISMS",
    "MECHANISMS",
    "Attention",
    "AttentionInputs",
    "BoundedCache",
    "Cache",
    "ContextualPositionAttention",
    "DenseAttention",
    "DifferentialAttention",
    "DistanceOnlyAttention",
    "EntmaxAttention",
    "ForgettingAttention",
    "LayerCache",
    "LinearBiasAttention",
    "LongShortTermMemory",
    "Mechanism",
    "NoPositionAttention",
    "PlainDistanceAttention",
    "RotaryAttention",
    "ScalableSoftmaxAttention",
    "SelectiveAttention",
    "SinusoidalAttention",
    "StaticCache",
    "StickBreakingAttention",
    "ThresholdOnlyAttention",
    "ThresholdRelativeAttention",
    "WeightMap",
    "constructor_arguments",
    "key_positions",
    "scores",
    "softmax_attention",
    "visible_keys",
]
