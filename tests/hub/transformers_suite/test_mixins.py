"""transformers' own test mixins, run for our mechanisms and for Llama as control."""

from __future__ import annotations

import pytest
from transformers import LlamaForSequenceClassification, LlamaForTokenClassification

from tests.hub.transformers_suite import upstream
from tests.hub.transformers_suite.tester import CLASSES, LlamaTester, SuiteCase

if reason := upstream.missing_reason():
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("parameterized", reason="the mixins of transformers need the package parameterized")

from tests.hub.transformers_suite.upstream import test_fsdp_mixin as fsdp
from tests.hub.transformers_suite.upstream import test_tensor_parallel_mixin as tensor_parallel
from tests.hub.transformers_suite.upstream.generation.test_utils import GenerationTesterMixin
from tests.hub.transformers_suite.upstream.test_modeling_common import ModelTesterMixin
from tests.hub.transformers_suite.upstream.test_training_mixin import TrainingTesterMixin

# The distributed tests are run for a list of models of transformers alone, unless there is no list.
fsdp.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
tensor_parallel.TP_DISTRIBUTED_TEST_MODEL_TYPES = None

pytestmark = pytest.mark.slow


class AllMixins(
    ModelTesterMixin,
    GenerationTesterMixin,
    TrainingTesterMixin,
    fsdp.FSDPTesterMixin,
    tensor_parallel.TensorParallelTesterMixin,
):
    """Everything that transformers asks of a causal language model."""

    model_tester = None
    all_model_classes = CLASSES


class TestTRA(AllMixins, SuiteCase):
    """Threshold relative attention."""

    mechanism = "tra"


class TestRope(AllMixins, SuiteCase):
    """Softmax attention with rotated queries and keys."""

    mechanism = "rope"


class TestLlama(AllMixins, SuiteCase):
    """The control."""

    mechanism = "rope"

    def setUp(self) -> None:
        super().setUp()
        self.model_tester = LlamaTester(self)
        self.all_model_classes = (
            self.model_tester.base_model_class,
            self.model_tester.causal_lm_class,
            LlamaForSequenceClassification,
            LlamaForTokenClassification,
        )
