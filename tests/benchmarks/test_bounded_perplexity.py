"""Perplexity through a bounded cache, against the loss of each token read by itself; and the whole command."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bounded_perplexity as module
from benchmarks.bounded_perplexity import Reading, by_document, main, readings, token_losses
from tra.attention import BoundedCache
from tra.evaluation.calibration import calibrate, dropped_weights, text_sequences
from tra.model import Decoder
from tra.presets import preset
from tra.runs import RunFolder, read_windows, write_windows
from tra.text import TokenStore, load_tokenizer
from tra.text.prepare import prepare
from tra.text.task import Stream
from tra.training.loss import cross_entropy_by_token

LENGTH = 160


def model_of(mechanism: str, n_layers: int = 1) -> Decoder:
    torch.manual_seed(0)
    changes = ["model.d_model=32", f"model.n_layers={n_layers}", f"model.mechanism={mechanism}", "model.gate_bias=3"]
    return Decoder(preset("text-demo").override(changes).model).eval()


@pytest.mark.parametrize("window", [8, 70])
def test_a_bounded_cache_reads_what_short_inputs_read(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one layer a token's loss is that of its last `window` tokens alone."""
    monkeypatch.setattr(module, "CHUNK", 48)
    model, ids = model_of("tra"), torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(0))
    found = token_losses(model, ids, Reading("bounded cache", window), "float32")
    whole = token_losses(model, ids, Reading("whole"), "float32")
    torch.testing.assert_close(found[:window], whole[:window])
    for target in (window + 1, 100, LENGTH - 1):
        alone = token_losses(model, ids[target - window : target + 1], Reading("whole"), "float32")[-1]
        torch.testing.assert_close(found[target - 1], alone)
    ((layer, x),) = model.attention_inputs(ids[None])
    dropped = torch.cat(list(dropped_weights(layer, x, torch.arange(LENGTH), (window,))), dim=1)
    assert float(dropped.max()) > 0.01  # so something was left out
    assert not torch.equal(found, whole)


@torch.no_grad()
def test_the_sliding_window_of_rope_is_its_bounded_cache() -> None:
    """Two implementations: a mask over blocks of rows, and a ring whose slots are written over."""
    model, ids = model_of("rope", 2), torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(0))
    found = token_losses(model, ids, Reading("window", 24), "float32")
    cache = BoundedCache(2, 24, chunk=32)
    hidden = torch.cat([model.hidden(piece, None, cache) for piece in ids[None, :-1].split(32, dim=1)], dim=1)
    torch.testing.assert_close(found, cross_entropy_by_token(model, hidden, ids[None, 1:])[0])


def test_documents_by_hand() -> None:
    stream = Stream("text", np.array([9, 1, 2, 9, 3, 4, 5, 9, 6]), np.array([[0, 0, 0], [3, 0, 0], [7, 0, 0]]), "", 9)
    found = by_document(np.array([0.5, 4.0, 1.0, 2.0, 3.0, 8.0], dtype=np.float32), stream, 2)
    assert found.tolist() == [[0.5, 1], [6.0, 3]]  # losses of separators, at 3 and 7, don't count


def test_ways_of_reading() -> None:
    assert [reading.method for reading in readings("tra", 64, (2, 64))] == ["whole", "bounded cache", "bounded cache"]
    assert list(readings("rope", 64, (2, 32))) == [
        Reading("whole"),
        Reading("window", 32),
        Reading("window and sinks", 32, 4),
        Reading("window", 2),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, and untrained runs."""
    folder, draw = tmp_path_factory.mktemp("runs"), random.Random(0)
    files = [folder / f"{number}.txt" for number in range(3)]
    for file in files:
        file.write_text(" ".join(draw.choice(("the", "cat", "sat", "on", "a", "mat")) for _ in range(90)))
    prepare([str(file) for file in files], folder / "store", tokenizer=load_tokenizer("bytes"))
    for name, changes in (
        ("tra", ["model.mechanism=tra"]),
        ("tra-margin-2", ["model.margin=2"]),
        ("rope", ["model.mechanism=rope"]),
        ("forgetting", ["model.mechanism=forgetting"]),
        ("alibi", ["model.mechanism=alibi"]),
    ):
        config = preset("text-demo").override(["model.d_model=32", "model.n_layers=1", *changes])
        run = RunFolder(folder / name)
        run.start(config, resume=False, overwrite=False)
        run.save_weights(Decoder(config.model), 0)
    return folder


@pytest.mark.slow
def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARES", (2, 32))
    runs = [str(folder / name) for name in ("tra", "tra-margin-2", "rope", "forgetting")]
    calibrated = RunFolder(folder / "tra-margin-2")
    sequences = text_sequences(Stream.of_store(TokenStore.open(folder / "store")), 257, 64, 2)
    write_windows(calibrated.windows_file, calibrate(calibrated, calibrated.load_model(), sequences, 0.1))
    arguments = ["--lengths", "128", "256", "--texts", "2", "--device", "cpu", "--json"]
    assert main([str(folder / "store"), *runs, *arguments, "--out", str(folder / "out/bounded")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads((folder / "out/bounded.json").read_text()) == result
    assert (folder / "out/bounded.png").stat().st_size > 5000
    rows = result["rows"]
    # the whole and two sizes; at 128 tokens one of these has room for sinks, at 256 both have
    assert len([row for row in rows if row["run"] == "tra"]) == 2 * 3
    by_calibration = [row for row in rows if row["method"] == "calibrated cache"]
    assert [(row["run"], row["length"]) for row in by_calibration] == [("tra-margin-2", 128), ("tra-margin-2", 256)]
    assert by_calibration[0]["windows"] == read_windows(calibrated.windows_file, calibrated).windows
    assert len([row for row in rows if row["run"] == "rope"]) == 2 * 3 + 1 + 2
    for row in rows:
        assert row["tokens"] > 0
        assert 1 < row["perplexity"] < 1000
        if row["method"] == "whole":
            assert row["times whole"] == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("nowhere", "tra"), "there is no token store nowhere"),
        (("store", "alibi"), "alibi has neither a bounded cache nor a sliding window here"),
        (("store", "flipflop-tra"), "learnt flipflop: perplexity is of language models"),
        (("store", "tra", "--lengths", "126"), "texts have at least 128 tokens"),
        (("store", "tra", "--texts", "0"), "texts have at least 128 tokens, and there is at least one"),
        (("store", "tra", "--lengths", "65536"), "store has .* tokens: too few for a text of 65,536"),
    ],
)
def test_bad_input(folder: Path, arguments: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=problem):
        main([*arguments, "--device", "cpu"])
