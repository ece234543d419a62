"""The decoder as a model of transformers. Importing this package registers it with AutoConfig, AutoModel and so on."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tra.hub._bounded_cache import TRABoundedCache
from tra.hub._cache import HubLayerCache
from tra.hub.config import TRAConfig
from tra.hub.heads import TRAForQuestionAnswering, TRAForSequenceClassification, TRAForTokenClassification
from tra.hub.model import TRAForCausalLM, TRAModel

__all__ = [
    "HubLayerCache",
    "TRABoundedCache",
    "TRAConfig",
    "TRAForCausalLM",
    "TRAForQuestionAnswering",
    "TRAForSequenceClassification",
    "TRAForTokenClassification",
    "TRAModel",
]

AutoConfig.register(TRAConfig.model_type, TRAConfig, exist_ok=True)
AutoModel.register(TRAConfig, TRAModel, exist_ok=True)
AutoModelForCausalLM.register(TRAConfig, TRAForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(TRAConfig, TRAForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(TRAConfig, TRAForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(TRAConfig, TRAForQuestionAnswering, exist_ok=True)
