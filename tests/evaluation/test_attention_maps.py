"""Attention maps as they are kept: a byte a weight, and where a key is not seen or dropped."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

import tra
from tra.attention import MECHANISMS
from tra.evaluation.attention_maps import WINDOW, attention_maps, write_maps
from tra.runs import LEVELS, RunFolder, weights_of
from tra.text.task import Stream

CPU = torch.device("cpu")


def decoder(mechanism: str) -> tra.Decoder:
    torch.manual_seed(0)
    return tra.Decoder(tra.DecoderConfig(320, d_model=32, n_layers=2, n_heads=4, mechanism=mechanism)).eval()


def stream(length: int) -> Stream:
    tokens = np.append(256, np.random.default_rng(0).integers(0, 256, length - 1))
    return Stream("drawn", tokens.astype(np.uint16), np.array([[0, length - 1, -1]]), "bytes", 256)


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name != "lstm"])
def test_weights_come_back_within_half_a_step(mechanism: str) -> None:
    model, tokens = decoder(mechanism), torch.arange(40)[None]
    maps = attention_maps(model, tokens)
    heads = 2 if mechanism == "differential" else 4  # whose heads are pairs of maps
    assert maps.shape == (2, heads, 40, 40)
    assert maps.dtype == np.uint8
    found = weights_of(maps)
    for layer, (attention, x) in enumerate(model.attention_inputs(tokens)):
        seen = attention.attention_map(x)
        assert np.array_equal(np.isnan(found[layer]), (seen.logits[0] == -torch.inf).numpy())
        exact = seen.weights[0].clamp(0, 1).double().sqrt().numpy()
        off = np.abs(np.sqrt(found[layer].astype(np.float64)) - exact)
        assert np.nanmax(off) <= 0.5 / LEVELS + 1e-6


def test_what_is_not_seen_and_what_is_dropped() -> None:
    """Of RoPE all keys up to the query; of TRA only some of them, and where none is kept the row is empty."""
    tokens, causal = torch.arange(40)[None], np.tri(40, dtype=bool)
    rope, dropping = (attention_maps(decoder(name), tokens) > 0 for name in ("rope", "tra"))
    assert (rope == causal).all()
    assert not (dropping & ~causal).any()
    assert 0.2 < dropping.sum() / rope.sum() < 0.8


def test_training_mode_does_not_show() -> None:
    torch.manual_seed(0)
    config = tra.DecoderConfig(320, d_model=32, n_layers=2, n_heads=2, mechanism="rope", dropout=0.5)
    model, tokens = tra.Decoder(config).train(), torch.arange(40)[None]
    assert np.array_equal(attention_maps(model, tokens), attention_maps(model.eval(), tokens))


@pytest.mark.parametrize(("length", "size"), [(2000, WINDOW), (100, 99)])
def test_windows_are_spread_over_the_text(tmp_path: Path, length: int, size: int) -> None:
    model, text = decoder("tra"), stream(length)
    write_maps(RunFolder(tmp_path), model, text, 3, CPU)
    with np.load(tmp_path / "maps-drawn.npz") as arrays:
        tokens, starts, maps = (arrays[name] for name in ("tokens", "starts", "maps"))
    assert tokens.shape == (3, size)
    assert maps.shape == (3, 2, 4, size, size)
    if length > 1000:
        assert starts.tolist() == [436, 872, 1308]  # quarters of the 1,744 places
    for row, start, found in zip(tokens, starts, maps, strict=True):
        assert np.array_equal(row, text.tokens[start : start + size])
        assert np.array_equal(found, attention_maps(model, torch.from_numpy(row.astype(np.int64))[None]))


def test_equal_maps_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = []
    for now in (1e9, 2e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        write_maps(RunFolder(tmp_path), decoder("tra"), stream(100), 2, CPU)
        contents.append((tmp_path / "maps-drawn.npz").read_bytes())
    assert contents[0] == contents[1]


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lstm has no attention to map"):
        attention_maps(decoder("lstm"), torch.arange(40)[None])
    with pytest.raises(ValueError, match="at least 1 window, got -1"):
        write_maps(RunFolder(tmp_path), decoder("tra"), stream(100), -1, CPU)
