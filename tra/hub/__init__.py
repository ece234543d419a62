"""The decoder as a model of transformers. Importing this package registers it with AutoConfig, AutoModel and so on."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tra.hub._cache import HubLayerCache
from tra.hub.config import TRAConfig
from tra.hub.model import TRAForCausalLM, TRAModel

__all__ = ["HubLayerCache", "TRAConfig", "TRAForCausalLM", "TRAModel"]

AutoConfig.register(TRAConfig.model_type, TRAConfig, exist_ok=True)
AutoModel.register(TRAConfig, TRAModel, exist_ok=True)
AutoModelForCausalLM.register(TRAConfig, TRAForCausalLM, exist_ok=True)
