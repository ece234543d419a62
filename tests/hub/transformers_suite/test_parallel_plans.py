"""The units of FSDP2 and the shards of tensor parallelism, found from the plans without starting processes."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.distributed.fsdp import _resolve_tied_embed_lm_head_plan, expand_fsdp_plan, verify_fsdp_plan
from transformers.distributed.tensor_parallel import _get_parameter_plan

from tests.hub.models import language_model
from tra.attention import MECHANISMS
from tra.hub import TRAForCausalLM
from tra.hub.config import SPLIT_BY_HEAD


def blocks(model: TRAForCausalLM) -> set[str]:
    """Return the names of the blocks, which are the modules that are not to be split."""
    return {name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mechanism", ["tra", "rope", "lstm"])
def test_fsdp_makes_a_unit_of_each_block(mechanism: str, tied: bool) -> None:
    model = language_model(mechanism, tie_word_embeddings=tied)
    names = {module: name for name, module in model.named_modules()}
    embedding, head = names[model.get_input_embeddings()], names[model.lm_head]
    reshard, keep = expand_fsdp_plan(model, _resolve_tied_embed_lm_head_plan(model._fsdp_plan, model))
    norms = {name for name, module in keep if isinstance(module, nn.RMSNorm)}
    assert len(blocks(model)) == model.config.num_hidden_layers
    assert {name for name, _ in reshard} == blocks(model) | (set() if tied else {embedding})
    assert {name for name, _ in keep} == norms | {embedding if tied else head}
    assert len(norms) == 1


def test_every_rule_of_the_fsdp_plan_applies(caplog: pytest.LogCaptureFixture) -> None:
    model = language_model()
    assert model._fsdp_plan
    matched = {name for group in expand_fsdp_plan(model, model._fsdp_plan) for name, _ in group}
    assert matched == blocks(model) | {name for name in matched if "layers" not in name and "blocks" not in name}
    verify_fsdp_plan([name for name, _ in model.named_modules()], model._fsdp_plan)
    assert "not applied" not in caplog.text


@pytest.mark.parametrize("mechanism", sorted(SPLIT_BY_HEAD))
def test_tensor_parallelism_shards_every_matrix(mechanism: str) -> None:
    """Inputs of a block are split by columns, its outputs by rows; gates are split as the heads are."""
    model = language_model(mechanism)
    assert model.supports_tp_plan
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        style = _get_parameter_plan(f"{name}.weight", model.tp_plan, is_weight=True)
        assert style is not None, f"{name} is left whole on every process"
        output = name.endswith(("o_proj", "down_proj"))
        assert style.startswith("rowwise") == output, (name, style)
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    assert model.tp_plan[head] == "colwise_gather_output"


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name not in SPLIT_BY_HEAD])
def test_what_is_not_alike_in_all_heads_is_not_split(mechanism: str) -> None:
    """Slopes, factors and states per head would have to be split with the heads, which no plan can say."""
    assert set(language_model(mechanism).tp_plan) == {"lm_head"}
