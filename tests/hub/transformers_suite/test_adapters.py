"""LoRA by PEFT."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hub.models import config, language_model, tokens
from tra.hub import TRAForCausalLM

peft = pytest.importorskip("peft")


def linears(model: nn.Module) -> list[str]:
    """Return the names of all linear layers but the head."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name]


@pytest.mark.parametrize("length", [4, 7])  # 4 is the number of heads, with which a wrong broadcast goes unseen
@pytest.mark.parametrize("mechanism", ["tra", "forgetting", "rope"])
def test_all_linear_layers_can_be_targets(mechanism: str, length: int) -> None:
    model, ids = language_model(mechanism), tokens(2, length)
    expected, names = model(ids).logits, linears(model)
    options = {"target_modules": "all-linear", "r": 2, "task_type": "CAUSAL_LM"}
    tuned = peft.get_peft_model(model, peft.LoraConfig(**options))
    adapted = [name for name, module in tuned.named_modules() if isinstance(module, peft.tuners.lora.Linear)]
    assert len(adapted) == len(names)
    torch.testing.assert_close(tuned(ids).logits, expected)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
    changed = tuned(ids).logits
    assert not torch.allclose(changed, expected)
    tuned(ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for name, weight in tuned.named_parameters() if "lora_" in name)
    torch.testing.assert_close(tuned.merge_and_unload()(ids).logits, changed)


def test_default_targets_are_queries_and_values() -> None:
    tuned = peft.get_peft_model(TRAForCausalLM(config()), peft.LoraConfig(task_type="CAUSAL_LM"))
    found = {name.rsplit(".", 1)[-1] for name in tuned.targeted_module_names}
    assert found == {"q_proj", "v_proj"}


def test_checkpointing_and_adapters_go_together() -> None:
    model = language_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    ids = tokens(2, 6)
    tuned(ids, labels=ids).loss.backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in tuned.parameters())
