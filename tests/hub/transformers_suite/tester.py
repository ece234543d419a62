"""What the mixins of transformers ask for: tiny configs of a decoder, and inputs for them."""

from __future__ import annotations

import unittest
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

import tra.hub
from tra.hub import TRAConfig, TRAForCausalLM, TRAModel

HEADS = {
    "TRAModel": "MODEL_MAPPING_NAMES",
    "TRAForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "TRAForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "TRAForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "TRAForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}
"""Our classes, and the tables of class names by which the mixins decide which labels a class takes."""

CLASSES = tuple(getattr(tra.hub, name) for name in HEADS if hasattr(tra.hub, name))


class Tester:
    """Gives a config and inputs, under the names that the mixins read."""

    batch_size, seq_length, encoder_seq_length, num_choices = 13, 7, 7, 4
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 4
    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2
    is_training = True
    base_model_class: type[PreTrainedModel]
    causal_lm_class: type[PreTrainedModel]

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent

    def sizes(self) -> dict[str, Any]:
        """Return what every config is made from."""
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        special = ("pad_token_id", "bos_token_id", "eos_token_id")
        return {name: getattr(self, name) for name in (*names, *special)} | {"num_key_value_heads": 2}

    def get_config(self) -> PreTrainedConfig:
        """Return a config of a tiny model."""
        raise NotImplementedError

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
        """Return a config and the arguments of `forward`, with padding on the right as transformers' own tester has."""
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        mask = torch.tril(torch.ones_like(ids))
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class TRATester(Tester):
    """A decoder with one of our mechanisms."""

    base_model_class, causal_lm_class = TRAModel, TRAForCausalLM

    def __init__(self, parent: unittest.TestCase, mechanism: str) -> None:
        super().__init__(parent)
        self.mechanism = mechanism

    def get_config(self) -> TRAConfig:
        return TRAConfig(mechanism=self.mechanism, **self.sizes())


class LlamaTester(Tester):
    """The control: what fails for Llama is not ours to mend."""

    base_model_class, causal_lm_class = LlamaModel, LlamaForCausalLM

    def get_config(self) -> LlamaConfig:
        return LlamaConfig(intermediate_size=37, max_position_embeddings=512, **self.sizes())


class SuiteCase(unittest.TestCase):
    """Names our classes in transformers' tables while a class of tests runs."""

    mechanism: ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        for model_class in CLASSES:
            table = getattr(modeling_auto, HEADS[model_class.__name__])
            cls.enterClassContext(patch.dict(table, {"tra": model_class.__name__}))

    def setUp(self) -> None:
        super().setUp()
        torch.manual_seed(0)
        self.model_tester = TRATester(self, self.mechanism)
