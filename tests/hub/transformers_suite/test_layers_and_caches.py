"""Early exit, maps with gradients, checkpointing layers, and caches of mechanisms that keep more than keys."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.hub.models import language_model, padded, tokens

MORE = ["forgetting", "selective", "lstm"]
"""Mechanisms whose cache holds further tensors."""


@pytest.mark.parametrize("mechanism", ["tra", "rope"])
def test_early_exit_changes_no_text(mechanism: str) -> None:
    model, ids = language_model(mechanism, num_hidden_layers=3), tokens(1, 6)
    before = model.config.to_dict()
    early = model.generate(ids, max_new_tokens=8, do_sample=False, assistant_early_exit=1)
    assert model.config.to_dict() == before
    assert torch.equal(early, model.generate(ids, max_new_tokens=8, do_sample=False))


def test_fewer_layers_in_the_config_are_fewer_layers_in_the_pass() -> None:
    """That is how transformers asks for an early exit."""
    model, ids = language_model(num_hidden_layers=3), tokens(1, 6)
    states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    model.config.num_hidden_layers = 1
    out = model.model(ids, output_hidden_states=True, use_cache=False)
    assert len(out.hidden_states) == 2
    torch.testing.assert_close(out.hidden_states[0], states[0])


@pytest.mark.parametrize("mechanism", ["tra", "rope", "forgetting"])
def test_maps_carry_gradients(mechanism: str) -> None:
    """A regulariser of attention reaches the queries, and gives the gradient of a difference quotient."""
    model, ids = language_model(mechanism).train(), tokens(2, 7)

    def entropy() -> torch.Tensor:
        maps = model(ids, output_attentions=True, use_cache=False).attentions
        return -sum((weights * weights.clamp(min=1e-9).log()).sum() for weights in maps)

    loss = entropy()
    assert loss.requires_grad
    loss.backward()
    names = ("query", "q_proj")
    weight = next(w for name, w in model.named_parameters() if any(f"{part}.weight" in name for part in names))
    assert weight.grad is not None
    step = 1e-6 * weight.grad / weight.grad.norm()
    with torch.no_grad():
        weight.add_(step)
        after = entropy()
        weight.sub_(2 * step)
        before = entropy()
    expected = weight.grad.norm() * 1e-6 * 2
    torch.testing.assert_close(after - before, expected, rtol=1e-3, atol=0)


def test_blocks_are_checkpointing_layers() -> None:
    model = language_model().train()
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert len(blocks) == model.config.num_hidden_layers
    model.gradient_checkpointing_enable()
    assert all(block.gradient_checkpointing for block in blocks)
    model.gradient_checkpointing_disable()
    assert not any(block.gradient_checkpointing for block in blocks)


def test_the_base_model_takes_what_any_model_takes() -> None:
    """Generic heads and pipelines hand on what they don't know."""
    model, ids = language_model(), tokens(1, 5)
    positions = torch.arange(5)[None]
    out = model.model(ids, position_ids=positions, cache_position=torch.arange(5), token_type_ids=None)
    torch.testing.assert_close(out.last_hidden_state, model.model(ids).last_hidden_state)
    with pytest.raises((TypeError, ValueError), match="unexpected"):
        model.model(ids, attention_maks=torch.ones_like(ids))


@pytest.mark.parametrize("mechanism", MORE)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_richer_caches_change_no_text(mechanism: str, options: dict[str, int]) -> None:
    model = language_model(mechanism)
    assert model.config.use_cache
    assert model.generation_config.use_cache is not False
    _, ids, mask = padded([9, 6, 2], "left")
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    cached = model.generate(**inputs, **options, use_cache=True, return_dict_in_generate=True)
    assert isinstance(cached.past_key_values, DynamicCache)
    assert torch.equal(cached.sequences, model.generate(**inputs, **options, use_cache=False))


@pytest.mark.parametrize("mechanism", MORE)
def test_richer_caches_are_copied_reordered_and_reset(mechanism: str) -> None:
    model, ids = language_model(mechanism), tokens(2, 8)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = model(ids[:, :5], use_cache=True).past_key_values
        assert cache.get_seq_length() == 5
        branch = copy.deepcopy(cache)
        branch.reorder_cache(torch.tensor([1, 0]))
        torch.testing.assert_close(model(ids[:, 5:], past_key_values=cache).logits, expected[:, 5:])
        torch.testing.assert_close(model(ids[:, 5:].flip(0), past_key_values=branch).logits, expected[:, 5:].flip(0))
        cache.reset()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("mechanism", MORE)
def test_richer_caches_are_cropped_or_say_that_they_cannot(mechanism: str) -> None:
    """Assisted decoding takes tokens back. A recurrent state can't be, so it must not pretend."""
    model, ids = language_model(mechanism), tokens(1, 8)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        if not cache.is_croppable:
            with pytest.raises((ValueError, RuntimeError), match="crop"):
                cache.crop(-3)
            return
        cache.crop(-3)
        torch.testing.assert_close(model(ids[:, 5:], past_key_values=cache).logits, model(ids).logits[:, 5:])
