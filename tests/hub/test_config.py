"""The config: the decoder's fields under transformers' names, and nothing guessed."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import tra
from tests.hub.models import config, decoder_config
from tra.attention import MECHANISMS
from tra.hub import TRAConfig


@pytest.mark.parametrize("mechanism", list(MECHANISMS))
def test_there_and_back(mechanism: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"block": "authors", "dropout": 0.25, "gate_bias": 3.0, "cope_positions": 7}
    changes |= {"rope_theta": 1e4, "embedding_init": "normal"}
    if mechanism != "lstm":
        changes |= {"qk_norm": True, "rotary": False}
    decoder = decoder_config(mechanism, **changes)
    assert TRAConfig.from_decoder(decoder, fuse_projections=True).to_decoder() == decoder
    decoder = dataclasses.replace(decoder, fuse_projections=False)  # unless asked for
    assert TRAConfig.from_decoder(decoder).to_decoder() == decoder
    TRAConfig.from_decoder(decoder, tie_word_embeddings=True, eos_token_id=3).save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, TRAConfig)
    assert again.to_decoder() == decoder
    assert again.tie_word_embeddings
    assert again.eos_token_id == 3


def test_defaults_are_the_decoder_s() -> None:
    plain = tra.DecoderConfig(vocab_size=50_304)
    assert TRAConfig().to_decoder() == dataclasses.replace(plain, n_kv_heads=plain.n_heads, fuse_projections=False)


@pytest.mark.parametrize("margin", [2.0, math.inf])
def test_threshold_and_margin_are_strict_json(margin: float, tmp_path: Path) -> None:
    ours = TRAConfig.from_decoder(decoder_config(margin=margin, threshold=-1.0))
    ours.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text(), parse_constant=pytest.fail)
    assert (stored["threshold"], stored["margin"]) == (-1.0, "inf" if margin == math.inf else margin)
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.threshold, again.margin) == (-1.0, margin)
    assert again.to_decoder() == ours.to_decoder()
    assert again.to_json_string() == ours.to_json_string()
    assert TRAConfig.from_dict(ours.to_dict()).to_dict() == ours.to_dict()
    assert "inf" in repr(ours) or margin != math.inf


def test_older_versions_read_what_they_understand(tmp_path: Path) -> None:
    """They would ignore a margin. So a config with one has a format that they refuse."""
    for changes, expected in (({}, 1), ({"margin": 2.0}, 2), ({"threshold": -1.0}, 2), ({"margin": math.inf}, 2)):
        TRAConfig.from_decoder(decoder_config(**changes)).save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["tra_format"] == expected
    changed = TRAConfig.from_decoder(decoder_config())
    changed.margin = math.inf
    assert changed.to_dict()["tra_format"] == 2


def test_a_folder_of_a_former_version_has_neither(tmp_path: Path) -> None:
    ours = TRAConfig.from_decoder(decoder_config())
    ours.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["threshold"], values["margin"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert AutoConfig.from_pretrained(tmp_path).to_decoder() == ours.to_decoder()
    assert (ours.threshold, ours.margin) == (0.0, 0.0)


def test_dropout_has_transformers_name_too() -> None:
    assert TRAConfig(attention_dropout=0.5).dropout == 0.5
    assert TRAConfig(dropout=0.5).attention_dropout == 0.5


@pytest.mark.parametrize("mechanism", list(MECHANISMS))
def test_every_mechanism_has_a_cache(mechanism: str) -> None:
    assert config(mechanism).use_cache


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mechanism": "rop"}, "unknown mechanism 'rop': did you mean 'rope'"),
        ({"hidden_size": "wide"}, "hidden_size must be of type int, got 'wide'"),
        ({"num_hidden_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"block": "post"}, "block must be one of 'pre', 'authors', got 'post'"),
        ({"tra_format": 4}, "the config has format 4, this tra reads up to 3: update tra"),
        ({"margin": "wide"}, "margin must be a number or inf, got 'wide'"),
        ({"margin": -2}, "margin must be at least 0, got -2.0"),
        ({"threshold": None}, "threshold must be of type float, got None"),
        ({"mechanism": "rope", "margin": 2}, "rope has no margin: leave it at 0, got 2.0"),
        ({"tra_format": "x", "mechanism": "of tomorrow"}, "tra_format must be a number, got 'x'"),
    ],
)
def test_bad_values_get_one_clear_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=message) as found:
        AutoConfig.from_pretrained(tmp_path)
    assert "\n" not in str(found.value)
