"""A saved folder loads like anybody's: written by several processes, by other tools, as adapters, in shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tests.hub.models import language_model, tokens
from tra.hub import TRAForCausalLM


def test_config_holds_no_digests(tmp_path: Path) -> None:
    language_model().save_pretrained(tmp_path)
    assert "weights_sha256" not in json.loads((tmp_path / "config.json").read_text())


def test_weights_rewritten_by_another_tool_load(tmp_path: Path) -> None:
    model = language_model()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    changed = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt", "tool": "another"})
    loaded = TRAForCausalLM.from_pretrained(tmp_path)
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name] + 1)


def test_config_rewritten_before_the_weights_loads(tmp_path: Path) -> None:
    """Every process of a distributed run may write config.json, and one of them an older one."""
    language_model().save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    other = language_model()
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    other.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    ids = tokens(1, 5)
    torch.testing.assert_close(TRAForCausalLM.from_pretrained(tmp_path)(ids).logits, other(ids).logits)


def test_what_accelerate_saves_loads(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = language_model()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    ids = tokens(1, 5)
    torch.testing.assert_close(TRAForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_tied_weights_stored_once_or_twice_load(tmp_path: Path) -> None:
    model = language_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    embedding = model.get_input_embeddings().weight.detach()
    save_file(weights | {"lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    loaded = TRAForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


def test_a_damaged_file_is_still_told(tmp_path: Path) -> None:
    """safetensors' own checks of structure stay."""
    language_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="can't be read"):
        TRAForCausalLM.from_pretrained(tmp_path)


def save_in_shards(rank: int, group: str, source: str, target: str) -> None:
    """Load a folder by FSDP2 as one of two processes, and save it as a distributed checkpoint."""
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=2)
    model = TRAForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(fsdp_size=2))
    model.save_pretrained(target, distributed_checkpoint=True)
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_distributed_checkpoint_loads(tmp_path: Path) -> None:
    model = language_model()
    model.save_pretrained(tmp_path / "whole")
    paths = [str(tmp_path / name) for name in ("group", "whole", "shards")]
    torch.multiprocessing.spawn(save_in_shards, tuple(paths), nprocs=2)
    ids = tokens(1, 5)
    assert not any((tmp_path / "shards").glob("model*.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, TRAForCausalLM])
def test_a_folder_of_an_adapter_loads(loader: type, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    language_model().save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    names = {name.rsplit(".", 1)[-1] for name, _ in model.model.named_modules()} & {"query", "q_proj"}
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=sorted(names), init_lora_weights=False))
    tuned.save_pretrained(adapter)
    ids = tokens(1, 5)
    torch.testing.assert_close(loader.from_pretrained(adapter)(ids).logits, tuned(ids).logits)
