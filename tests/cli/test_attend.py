"""What a run attends to on one sequence: the numbers, the command, and how bad requests are answered."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tra
from tests.cli.conftest import CallTra, Command, output_or_error
from tra.attention import MECHANISMS, WeightMap
from tra.attention.shared.base import Attention
from tra.evaluation import attention_maps as maps
from tra.evaluation.attention_maps import InputSequence, attend, task_sequence
from tra.presets import preset
from tra.runs import SHIPPED, RunFolder, read_attention, weights_of
from tra.tasks import Copy, FlipFlop
from tra.text import load_tokenizer
from tra.text.store import StoreWriter, TokenPart
from tra.training import train


def decoder(mechanism: str = "tra", vocabulary: int = 5, **changes: float) -> tra.Decoder:
    torch.manual_seed(0)
    config = tra.DecoderConfig(vocabulary, d_model=32, n_layers=2, n_heads=4, mechanism=mechanism, **changes)
    model = tra.Decoder(config)
    torch.nn.init.normal_(model.embed_tokens.weight)
    return model.eval()


def drawn(length: int) -> InputSequence:
    tokens = torch.randint(5, (length,), generator=torch.Generator().manual_seed(0))
    return InputSequence(tokens, ["wri01"[token] for token in tokens.tolist()], [3, length - 1], "drawn")


@pytest.fixture
def command(call_tra: CallTra, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, **options: output_or_error(*call_tra(*arguments, **options))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained, but for two steps: flip-flop with TRA and an LSTM, text with TRA and RoPE."""
    folder = tmp_path_factory.mktemp("runs")
    small = ("model.d_model=32", "train.batch_size=4", "train.steps=2")
    for name in ("tra", "lstm"):
        changes = (*small, "task.arguments.length=16", f"model.mechanism={name}")
        train(preset("demo").override(changes), folder / f"flipflop-{name}", device=torch.device("cpu"))
    for name in ("tra", "rope"):
        changes = (*small, f"model.mechanism={name}")
        train(preset("text-demo").override(changes), folder / f"text-{name}", device=torch.device("cpu"))
    return folder


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name != "lstm"])
def test_a_window_is_the_window_of_the_map(mechanism: str) -> None:
    model, shown = decoder(mechanism), drawn(40)
    found = attend(model, shown, rows=(20, 30), keys=(5, 35), layers=[1], heads=[1, 0])
    layer, x = model.attention_inputs(shown.tokens[None])[1]
    whole = layer.attention_map(x)
    kept = whole.logits[0] > -torch.inf
    for place, head in enumerate((1, 0)):
        here = found.weights[0, place]
        assert np.array_equal(here > 0, kept[head, 20:30, 5:35].numpy())
        exact = whole.weights[0, head, 20:30, 5:35].clamp(0, 1).numpy()
        assert np.nanmax(np.abs(np.sqrt(weights_of(here)) - np.sqrt(exact))) <= 0.5 / 63 + 1e-6
        assert np.array_equal(found.null[0, place], ~kept[head, 20:30].any(-1).numpy())
        for row in range(10):
            for column in range(30):
                i, j = 20 + row, 5 + column
                distance = (
                    int(kept[head, i, j : i + 1].sum()) if mechanism in ("tra", "tra-threshold-only") else i - j + 1
                )
                assert found.distances[0, place, row, column] == (distance if kept[head, i, j] else 0)
                content = whole.content[0, head, i, j] if j <= i else 0.0
                assert found.content[0, place, row, column] == pytest.approx(float(content), rel=1e-3, abs=1e-3)
    assert found.rows.tolist() == list(range(20, 30))
    assert found.columns.tolist() == list(range(5, 35))
    assert "".join(found.symbols) == "".join(shown.symbols[5:35])
    assert "".join(found.row_symbols) == "".join(shown.symbols[20:30])
    assert (found.layers.tolist(), found.heads.tolist(), found.marked.tolist()) == ([1], [1, 0], [])


@pytest.mark.parametrize("margin", [0.0, 0.75, math.inf])
def test_keys_inside_the_margin(margin: float) -> None:
    """Which stay without counting, and all distances, by the definition."""
    model, shown = decoder(threshold=0.25, margin=margin), drawn(40)
    found = attend(model, shown, rows=(20, 30), keys=(5, 35), layers=[1], heads=[2])
    layer, x = model.attention_inputs(shown.tokens[None])[1]
    content = layer.attention_map(x).content[0, 2].tolist()
    for row in range(10):
        for column in range(30):
            i, j = 20 + row, 5 + column
            stays = j <= i and content[i][j] > 0.25 - margin
            counts = stays and content[i][j] > 0.25
            right = sum(score > 0.25 for score in content[i][j + 1 : i + 1])
            assert (found.weights[0, 0, row, column] > 0) == stays
            assert found.uncounted[0, 0, row, column] == (stays and not counts)
            assert found.distances[0, 0, row, column] == (1 + right if stays else 0)
    assert found.uncounted.any() == (margin > 0)
    assert found.mechanism == {0.0: "tra, threshold 0.25", 0.75: "tra, threshold 0.25, margin 0.75"}.get(
        margin, "tra, threshold 0.25, margin inf"
    )


@pytest.mark.parametrize("mechanism", ["tra", "rope"])
def test_a_long_input_is_never_held_whole(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shown, looked_at = decoder(mechanism), drawn(8192), []
    plain = Attention.attention_map

    def look(self: Attention, x: torch.Tensor, key_mask: Any = None, rows: torch.Tensor | None = None) -> WeightMap:
        assert rows is not None
        found = plain(self, x, key_mask, rows)
        looked_at.append(found.weights.shape)
        return found

    monkeypatch.setattr(Attention, "attention_map", look)
    found = attend(model, shown)
    assert found.weights.shape == found.content.shape == found.distances.shape == (2, 4, 64, 64)
    assert found.rows.tolist() == found.columns.tolist() == list(range(8128, 8192))
    assert found.marked.tolist() == [8191]
    assert "8,128 to 8,191 of 8,192" in found.title
    assert [shape[2:] for shape in looked_at] == [(64, 8192)] * 2
    monkeypatch.setattr(maps, "MAX_CELLS", 64 * 1024)
    wide = attend(model, drawn(1024), rows=(700, 900), keys=(0, 100), layers=[0])
    assert [shape[2] for shape in looked_at[2:]] == [64, 64, 64, 8]
    monkeypatch.setattr(maps, "MAX_CELLS", 1024 * 1024)
    at_once = attend(model, drawn(1024), rows=(700, 900), keys=(0, 100), layers=[0])
    assert looked_at[-1][2] == 200
    assert np.array_equal(wide.distances, at_once.distances)
    assert np.abs(wide.weights.astype(int) - at_once.weights.astype(int)).max() <= 1  # a product's last digit


def test_a_row_whose_keys_are_elsewhere_is_not_null() -> None:
    model = decoder()
    found = attend(model, drawn(400), rows=(300, 400), keys=(398, 400))
    empty = (found.weights == 0).all(-1)
    assert empty.sum() > found.null.sum()
    assert not (found.null & ~empty).any()


def test_sequences_of_tasks() -> None:
    task = FlipFlop(16)
    shown = task_sequence(task, "sparse", seed=3)
    assert shown.marked == [place for place, symbol in enumerate(shown.symbols) if symbol == "r"]
    assert shown.title == "flipflop, sparse, seed 3"
    assert task_sequence(task, "sparse", seed=3).symbols == shown.symbols
    assert [task_sequence(task, "iid", seed).symbols for seed in (1, 2)] != [shown.symbols] * 2
    written = task_sequence(task, "iid", text="w1i0r1")
    assert (written.symbols, written.marked) == (list("w1i0r1"), [4])
    copied = task_sequence(Copy(), "iid")
    assert copied.symbols[-1] == "<eos>"
    assert copied.symbols[copied.marked[0]] == "<sep>"


def test_the_shipped_run_is_drawn_and_stays_as_it_is(command: Command, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (SHIPPED / "flipflop-tra").iterdir()}
    status, said = command("attend", "flipflop-tra", "--layers", 3)
    assert (status, said.split()) == (0, ["attend-flipflop-tra.npz", "attend.png"])
    assert {path: path.stat().st_mtime_ns for path in (SHIPPED / "flipflop-tra").iterdir()} == before
    found = read_attention(tmp_path / "attend-flipflop-tra.npz")
    assert found.weights.shape == (1, 4, 64, 64)
    assert found.title == "flipflop, iid, seed 0, 448 to 511 of 512"
    # What the paper claims, seen in numbers: at a read, some head of the last layer looks at the last write alone.
    symbols = found.symbols.tolist()
    read = int(found.marked[-1] - found.rows[0])
    written = max(place for place in range(read) if symbols[place] == "w")
    weights = np.nan_to_num(weights_of(found.weights[0, :, read]))
    assert weights[:, written : written + 2].sum(-1).max() > 0.8


def test_a_sequence_that_is_written_out(command: Command, tmp_path: Path) -> None:
    assert command("attend", "flipflop-tra", "--text", "w1i0r1", "--heads", 0, "--out", "deep/short.svg")[0] == 0
    assert (tmp_path / "deep/short.svg").read_text().lstrip().startswith("<?xml")
    found = read_attention(tmp_path / "deep/short-flipflop-tra.npz")
    assert (found.symbols.tolist(), found.marked.tolist(), found.heads.tolist()) == (list("w1i0r1"), [4], [0])


def test_runs_side_by_side_look_at_the_same(command: Command, runs: Path, tmp_path: Path) -> None:
    status, said = command("attend", "flipflop-tra", runs / "flipflop-tra", "--split", "dense", "--out", "both.png")
    assert (status, said.split()) == (0, ["both-flipflop-tra.npz", str(runs / "flipflop-tra/attend.npz"), "both.png"])
    ours, other = read_attention(tmp_path / "both-flipflop-tra.npz"), read_attention(runs / "flipflop-tra/attend.npz")
    assert ours.symbols.tolist() == other.symbols.tolist()
    assert (ours.weights.shape[:2], other.weights.shape[:2]) == ((4, 4), (2, 2))
    assert (tmp_path / "both.png").stat().st_size > 5000


def test_a_language_model(command: Command, runs: Path, tmp_path: Path) -> None:
    status, said = command("attend", runs / "text-tra", "--prompt", "to $1 or\nto $2")
    assert (status, said.split()) == (0, [str(runs / "text-tra/attend.npz"), str(runs / "text-tra/attend.png")])
    found = read_attention(runs / "text-tra/attend.npz")
    assert found.symbols.tolist() == ["<sep>", *"to $1 or\nto $2"]
    assert (found.marked.tolist(), found.mechanism) == ([], "tra")

    with StoreWriter(tmp_path / "store", load_tokenizer("bytes")) as writer:
        writer.add(TokenPart(True, np.frombuffer(b"0123456789" * 30, np.uint8), 300, 1))
        writer.seal([])
    window = ("--start", 11, "--window", 5, "--out", "x.png")
    assert command("attend", runs / "text-tra", runs / "text-rope", "--text", "store", *window)[0] == 0
    for name in ("text-tra", "text-rope"):
        assert "".join(read_attention(runs / name / "attend.npz").symbols) == "01234"
    assert command("attend", runs / "text-rope", "--window", 300)[0] == 0
    assert read_attention(runs / "text-rope/attend.npz").rows.tolist() == list(range(236, 300))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attend"], "name at least one run"),
        (["attend", "flipflop-tra", "--layers", "4"], "there is no layer 4: layers go from 0 to 3"),
        (["attend", "flipflop-tra", "--heads", "-1"], "there is no head -1: heads go from 0 to 3"),
        (["attend", "flipflop-tra", "--rows", "500", "513"], "rows go from 0 up to 512"),
        (["attend", "flipflop-tra", "--rows", "9", "9"], "got 9 to 9"),
        (["attend", "flipflop-tra", "--keys", "-5", "9"], "keys go from 0 up to 512"),
        (["attend", "flipflop-tra", "--split", "64x", "--rows", "0", "2000"], "rows can be 1,024 at most, got 2,000"),
        (["attend", "flipflop-tra", "--out", "a.jpg"], "a figure ends in .png, .svg or .pdf, got 'a.jpg'"),
        (["attend", "flipflop-tra", "--split", "dens"], "did you mean 'dense'"),
        (["attend", "flipflop-tra", "--text", "w1r0"], "the other bit was written"),
        (["attend", "flipflop-tra", "--prompt", "x"], "are for language models; this run learnt flipflop"),
        (["attend", "flipflop-tra", "--text", "w1r1", "--seed", "1"], "either --text or a --split"),
        (["attend", "none"], "none doesn't exist"),
        (["attend", "RUNS/flipflop-lstm"], "lstm has no attention to map"),
        (["attend", "flipflop-tra", "RUNS/text-tra"], "different tasks"),
        (["attend", "RUNS/text-tra", "--split", "iid"], "are for tasks; this run learnt text"),
        (["attend", "RUNS/text-tra", "--prompt", "x", "--start", "1"], "either --prompt or a window"),
        (["attend", "RUNS/text-tra", "--prompt", ""], "at least one character"),
        (["attend", "RUNS/text-tra", "--start", "99999999"], "can't start at 99,999,999"),
        (["attend", "RUNS/text-tra", "--window", "0"], "a window of 0 can't start at 0"),
        (["attend", "RUNS/text-tra", "--text", "none"], "none"),
    ],
)
def test_bad_requests(command: Command, runs: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    status, said = command(*(argument.replace("RUNS", str(runs)) for argument in arguments))
    assert status == 2
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_equal_maps_give_equal_bytes(runs: Path, command: Command) -> None:
    file, contents = RunFolder(runs / "flipflop-tra").path / "attend.npz", []
    for _ in range(2):
        assert command("attend", runs / "flipflop-tra")[0] == 0
        contents.append(file.read_bytes())
    assert contents[0] == contents[1]
