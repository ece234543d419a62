"""Runs that were saved under former names of parameters: their weights load, and their training goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.training.test_trainer import assert_same_run, small
from tra.evaluation.exact_match import evaluate_task
from tra.runs import RunFolder, rename_parameters
from tra.training.checkpoint import checkpoints, load_checkpoint, load_tensors, save_checkpoint, save_tensors
from tra.training.start import train

FORMER = {
    "tra": {
        "embedding.weight": "embed_tokens.weight",
        "blocks.11.attention_norm.weight": "layers.11.input_layernorm.weight",
        "blocks.11.attention.query.weight": "layers.11.self_attn.q_proj.weight",
        "blocks.11.attention.key.weight": "layers.11.self_attn.k_proj.weight",
        "blocks.11.attention.value.weight": "layers.11.self_attn.v_proj.weight",
        "blocks.11.attention.out.weight": "layers.11.self_attn.o_proj.weight",
        "blocks.11.attention.out.bias": "layers.11.self_attn.o_proj.bias",
        "blocks.11.attention.gate.weight": "layers.11.self_attn.gate.linear.weight",
        "blocks.11.attention.gate.bias": "layers.11.self_attn.gate.linear.bias",
        "blocks.11.mlp_norm.weight": "layers.11.post_attention_layernorm.weight",
        "blocks.11.mlp.up.weight": "layers.11.mlp.up_proj.weight",
        "blocks.11.mlp.up.bias": "layers.11.mlp.up_proj.bias",
        "blocks.11.mlp.down.weight": "layers.11.mlp.down_proj.weight",
        "blocks.11.mlp.down.bias": "layers.11.mlp.down_proj.bias",
        "norm.weight": "norm.weight",
        "head.weight": "lm_head.weight",
    },
    "others": {
        "blocks.0.attention.embedding": "layers.0.self_attn.embedding",
        "blocks.0.attention.lambdas": "layers.0.self_attn.lambdas",
        "blocks.0.attention.norm.weight": "layers.0.self_attn.norm.weight",
        "blocks.0.attention.strength": "layers.0.self_attn.strength",
        "blocks.0.attention.recurrence.weight_ih_l0": "layers.0.self_attn.recurrence.weight_ih_l0",
    },
}
NOW = {now: former for names in FORMER.values() for former, now in names.items()}


def former(name: str) -> str:
    """The former name of a parameter of layer 0 or above, with its prefix."""
    prefix, name = re.fullmatch(r"((?:model|optimizer\.\w+)\.)?(.*)", name).groups(default="")  # type: ignore[union-attr]
    number = (re.findall(r"\d+", name) or ["11"])[0]
    return prefix + NOW[name.replace(f".{number}.", ".11.")].replace(".11.", f".{number}.")


@pytest.mark.parametrize("prefix", ["", "model.", "optimizer.exp_avg_sq."])
@pytest.mark.parametrize("mechanism", FORMER)
def test_every_name(mechanism: str, prefix: str) -> None:
    names = {prefix + old: prefix + new for old, new in FORMER[mechanism].items()}
    assert list(rename_parameters(names).items()) == [(new, new) for new in names.values()]
    assert rename_parameters({"window": 1} | rename_parameters(names)) == {"window": 1} | rename_parameters(names)


def test_the_shipped_run_has_former_names_and_does_its_task() -> None:
    run = RunFolder.open("flipflop-tra")
    assert {"embedding.weight", "blocks.0.attention.gate.weight"} <= load_tensors(run.weights_file)[0].keys()
    config = run.config()
    (score,) = evaluate_task(run.load_model(), config.task.build(), config.evaluate, splits=["iid"], examples=5)
    assert score.exact == 1.0


def test_a_run_goes_on_from_a_checkpoint_with_former_names(tmp_path: Path) -> None:
    """To the same bits, weights and all."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        train(small("train.steps=15"), folder, device=torch.device("cpu"))
    (resumed / "model.safetensors").unlink()
    state = load_checkpoint(resumed / "checkpoints")
    assert state is not None
    assert state.step == 10
    renamed = {former(name) if name != "window" else name: tensor for name, tensor in state.tensors.items()}
    assert "optimizer.exp_avg.blocks.0.attention.gate.weight" in renamed
    assert not renamed.keys() & (state.tensors.keys() - {"window"} - {name for name in renamed if "norm" in name})
    for path in checkpoints(resumed / "checkpoints"):
        path.unlink()
    save_checkpoint(resumed / "checkpoints", state._replace(tensors=renamed))
    train(None, resumed, resume=True, device=torch.device("cpu"))
    assert_same_run(whole, resumed)
    tensors, metadata = load_tensors(whole / "model.safetensors")
    save_tensors(resumed / "model.safetensors", {former(name): tensor for name, tensor in tensors.items()}, metadata)
    models = [RunFolder.open(folder).load_model() for folder in (whole, resumed)]
    for one, other in zip(*(model.state_dict().items() for model in models), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
