"""The layer in a model of someone else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import tra
from tests.hub.models import padded, tokens

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_with_tra.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_with_tra", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, num_key_value_heads=2, **sizes)).double().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(50)
    return model


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


def test_every_attention_is_tra_with_the_old_projections(example: ModuleType) -> None:
    old, model = plain(), example.with_tra(plain())
    for before, after in zip(old.model.layers, model.model.layers, strict=True):
        assert isinstance(after.self_attn, tra.ThresholdRelativeAttention)
        assert torch.equal(after.self_attn.q_proj.weight, before.self_attn.q_proj.weight)
        assert torch.equal(after.self_attn.o_proj.weight, before.self_attn.o_proj.weight)
    ids = tokens(2, 9)
    assert not torch.allclose(model(ids).logits, old(ids).logits)
    layer = model.model.layers[0].self_attn
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], tra.ThresholdRelativeAttention.forward(layer, x))


@pytest.mark.parametrize("mode", [{"do_sample": False}, {"num_beams": 3}])
def test_generation_with_cache_is_that_without(example: ModuleType, mode: dict[str, object]) -> None:
    model = example.with_tra(plain())
    rows, ids, mask = padded([9, 6, 2], "left")
    together = model.generate(ids, attention_mask=mask, max_new_tokens=9, **mode)
    without = model.generate(ids, attention_mask=mask, max_new_tokens=9, use_cache=False, **mode)
    assert torch.equal(together, without)
    assert len(together.unique()) > 2
    for row, text in zip(rows, together[:, 9:], strict=True):
        assert model.generate(row, max_new_tokens=9, **mode)[0, row.shape[1] :].tolist() == text.tolist()


def test_pieces_are_the_whole(example: ModuleType) -> None:
    model, ids, cache = example.with_tra(plain()), tokens(2, 12), DynamicCache()
    with torch.no_grad():
        pieces = [model(piece, past_key_values=cache).logits for piece in ids.split([5, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), model(ids).logits)
        with pytest.raises(ValueError, match="takes a dynamic cache"):
            model(ids, past_key_values=StaticCache(model.config, max_cache_len=20))


def test_it_learns(example: ModuleType) -> None:
    model, ids = example.with_tra(plain()).train(), tokens(4, 12)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_the_example_runs() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    *steps, text = done.stdout.splitlines()
    assert float(steps[-1].split()[-1]) < 0.1
    assert text == str([list(range(5, 16))])
