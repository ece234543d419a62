"""LoRA by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.hub.models import VOCABULARY, config, language_model, tokens
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


DEFAULTS = {
    "IA3Config": {"k_proj", "v_proj", "down_proj"},
    "LNTuningConfig": {"input_layernorm", "post_attention_layernorm", "norm"},
    "VeraConfig": {"q_proj", "v_proj"},
    "BeftConfig": {"v_proj"},
}


@pytest.mark.parametrize("kind", list(DEFAULTS))
def test_default_targets_are_llama_s(kind: str) -> None:
    """For methods other than LoRA too."""
    tuned = peft.get_peft_model(TRAForCausalLM(config()), getattr(peft, kind)(task_type="CAUSAL_LM"))
    assert {name.rsplit(".", 1)[-1] for name in tuned.targeted_module_names} == DEFAULTS[kind]
    ids = tokens(2, 6)
    tuned(ids, labels=ids).loss.backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in tuned.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options", [{"trainable_token_indices": [31, 32]}, {"target_modules": ["q_proj", "embed_tokens"]}]
)
def test_embeddings_can_be_adapted(options: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    """Of new tokens alone, as PEFT advises after `add_tokens`, or of all."""
    model = language_model(tie_word_embeddings=tied)
    model.resize_token_embeddings(VOCABULARY + 2)
    model.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = torch.tensor([[3, 31, 4, 32, 5]])
    before = model(ids).logits
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.testing.assert_close(tuned(ids).logits, before)
    optimizer = torch.optim.SGD([weight for weight in tuned.parameters() if weight.requires_grad], 1.0)
    for _ in range(2):
        optimizer.zero_grad()
        tuned(ids, labels=ids).loss.backward()
        optimizer.step()
    after = tuned(ids).logits
    assert not torch.allclose(after, before)
    tuned.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")(ids).logits, after)
    with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.32"):
        tuned(ids + 1)


def test_checkpointing_and_adapters_go_together() -> None:
    model = language_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    ids = tokens(2, 6)
    tuned(ids, labels=ids).loss.backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in tuned.parameters())
