"""Folders: what is saved is what is loaded, here and elsewhere, and no pickle is ever opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from tests.hub.models import SOME_MECHANISMS, config, language_model, tokens
from tra.hub import TRAForCausalLM, TRAModel
from tra.model import Decoder

FILES = {"config.json", "generation_config.json", "model.safetensors", "modeling_tra.py"}


@SOME_MECHANISMS
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_round_trip_to_the_bit(mechanism: str, tied: bool, shards: bool, tmp_path: Path) -> None:
    model, ids = language_model(mechanism, tie_word_embeddings=tied, dropout=0.25).float(), tokens(2, 9)
    model.save_pretrained(tmp_path, **({"max_shard_size": "10KB"} if shards else {}))
    names = {path.name for path in tmp_path.iterdir()}
    assert len([name for name in names if name.endswith(".safetensors")]) > 1 if shards else names == FILES
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert isinstance(again, TRAForCausalLM)
    assert not again.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == tied
    assert again.config.to_decoder() == model.config.to_decoder()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        body = AutoModel.from_pretrained(tmp_path)
        assert isinstance(body, TRAModel)
        assert torch.equal(body(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize("margin", [0.75, "inf"])
@torch.no_grad()
def test_a_margin_is_there_in_outputs_and_maps_of_a_loaded_folder(margin: float | str, tmp_path: Path) -> None:
    language_model(margin=margin, threshold=0.25).float().save_pretrained(tmp_path)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path), tokens(2, 12)
    out, decoder = model(ids, output_attentions=True), Decoder(model.config.to_decoder())
    decoder.load_state_dict({name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()})
    torch.testing.assert_close(out.logits, decoder(ids))
    torch.testing.assert_close(model(ids).logits, decoder(ids))
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    for weights, (attention, x) in zip(out.attentions, decoder.attention_inputs(ids), strict=True):
        assert attention.margin == float(margin)
        content = attention.attention_map(x).content
        assert torch.equal(weights > 0, (content > 0.25 - float(margin)) & visible)
        assert ((content <= 0.25) & (weights > 0)).any()


def test_a_body_gets_a_head(tmp_path: Path) -> None:
    """A base model's folder loads as a language model, whose head is new."""
    body = language_model().model.float()
    body.save_pretrained(tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.weight"}
    assert torch.equal(model.model(tokens(2, 9)).last_hidden_state, body(tokens(2, 9)).last_hidden_state)


ELSEWHERE = """
import json, sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

assert not any(name.startswith("tra.") for name in sys.modules)
folder, again, ids = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[3]))
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
body = AutoModel.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__ == "tra.hub.model"
assert AutoConfig.from_pretrained(folder, trust_remote_code=True) == model.config
with torch.no_grad():
    torch.save((model(ids).logits, body(ids).last_hidden_state), sys.argv[4])
model.save_pretrained(again)
"""


def test_loads_in_a_process_that_knows_nothing(tmp_path: Path) -> None:
    model, ids = language_model(tie_word_embeddings=True).float(), tokens(2, 9)
    model.save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "model"), str(tmp_path / "again"), json.dumps(ids.tolist()), str(tmp_path / "out.pt")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    logits, hidden = torch.load(tmp_path / "out.pt")
    assert torch.equal(logits, model(ids).logits)
    assert torch.equal(hidden, model.model(ids).last_hidden_state)
    assert {path.name for path in (tmp_path / "again").iterdir()} == FILES
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes(), name


class Trap:
    """What a pickle could do."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (self.touched,))  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt"])
def test_pickles_are_refused(name: str, tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    torch.save({"weight": Trap(tmp_path / "touched")}, tmp_path / name)
    for load in (AutoModelForCausalLM, AutoModel, TRAForCausalLM):
        with pytest.raises(ValueError, match=rf"has pickled weights alone \({name}\), which are never opened") as found:
            load.from_pretrained(tmp_path)
        assert "\n" not in str(found.value)
    (tmp_path / "model.half.safetensors").touch()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    language_model().float().save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)  # safetensors beside it are taken
    with pytest.raises(ValueError, match="from safetensors alone"):
        TRAForCausalLM.from_pretrained(tmp_path, use_safetensors=False)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("damage", ["empty", "short", "cut", "header", "none"])
def test_damaged_weights_get_one_clear_line(damage: str, tmp_path: Path) -> None:
    language_model().float().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(
        {
            "empty": b"",
            "short": whole[:5],
            "cut": whole[: len(whole) // 2],
            "header": whole[:8] + b"?" + whole[9:],
            "none": whole,
        }[damage]
    )
    if damage == "none":
        file.unlink()
    message = "has no weights: expected model.safetensors" if damage == "none" else "can't be read: "
    with pytest.raises(ValueError, match=message) as found:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert str(tmp_path) in str(found.value)
    assert "\n" not in str(found.value)


def test_digests_of_former_versions_are_left_out(tmp_path: Path) -> None:
    """They were of files, not of the model, and other tools rewrite files."""
    language_model().float().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"weights_sha256": {"model.safetensors": "0"}}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "weights_sha256" not in model.config.to_dict()


FORMER_NAMES = {
    "embed_tokens.": "decoder.embedding.",
    "layers.": "decoder.blocks.",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "self_attn.gate.linear": "attention.gate",
    "self_attn": "attention",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "model.norm": "model.decoder.norm",
}


@pytest.mark.parametrize("mechanism", ["tra", "cope", "lstm"])
def test_folders_with_former_names_load(mechanism: str, tmp_path: Path) -> None:
    """As a language model and as its body; they are saved under the names now."""
    model = language_model(mechanism).float()
    model.save_pretrained(tmp_path / "now")
    (tmp_path / "former").mkdir()
    tensors = {}
    for name, tensor in load_file(tmp_path / "now" / "model.safetensors").items():
        for now, former in FORMER_NAMES.items():
            name = name.replace(now, former)
        tensors[name] = tensor
    assert {"model.decoder.embedding.weight", "model.decoder.norm.weight", "lm_head.weight"} <= tensors.keys()
    save_file(tensors, tmp_path / "former" / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "now" / "config.json").read_text())
    del values["fuse_projections"]
    (tmp_path / "former" / "config.json").write_text(json.dumps(values))
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "former", output_loading_info=True)
    assert not any(report.values())
    assert not again.config.fuse_projections
    body = AutoModel.from_pretrained(tmp_path / "former")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(body.state_dict()[name], tensor), name
    again.save_pretrained(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == set(model.state_dict())
