"""Windows by the weight that they leave out, against whole maps, and on sequences that they weren't measured on."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tra
from tra.attention import ThresholdRelativeAttention
from tra.config import EvalConfig
from tra.evaluation import calibration as module
from tra.evaluation.calibration import (
    DroppedWeight,
    calibrate,
    candidate_windows,
    dropped_weights,
    measure_dropped_weight,
    task_sequences,
    text_sequences,
)
from tra.presets import preset
from tra.runs import RunFolder, model_identity, read_windows, write_windows
from tra.tasks import Copy, FlipFlop
from tra.text.task import Stream, Text

TOLERANCE = 1e-3


@pytest.mark.parametrize("margin", [0.0, 2.0, math.inf])
def test_against_a_whole_map(margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CELLS", 100)  # several blocks of queries
    torch.manual_seed(0)
    layer = ThresholdRelativeAttention(32, 4, 2, margin=margin, gate_bias=1.0).double()
    x, rows, windows = torch.randn(1, 24, 32).double(), torch.arange(10, 24), (1, 2, 5, 16, 40)
    blocks = list(dropped_weights(layer, x, rows, windows))
    assert len(blocks) > 2
    weights = layer.attention_map(x).weights[0]
    for column, window in enumerate(windows):
        older = (torch.arange(24)[:, None] - torch.arange(24)) >= window
        expected: Tensor = (weights * older).sum(-1)[:, rows]
        torch.testing.assert_close(torch.cat(blocks, dim=1)[..., column], expected, rtol=1e-12, atol=1e-15)


def test_candidates_go_up_to_half_the_length() -> None:
    assert candidate_windows(50) == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert candidate_windows(2) == (1,)


def test_smallest_windows_by_hand() -> None:
    """Of two heads, one drops little from window 2 on, the other never does."""
    weight = np.array([[[[0.5, 0.0004, 0.0], [0.5, 0.4, 0.3]]]] * 2)
    found = DroppedWeight((1, 2, 4), weight, np.array([[[[1, 0, 0], [1, 1, 1]]]] * 2), np.array([1, 1]))
    assert module._smallest(found.mean() < TOLERANCE, found.windows).tolist() == [[2, 0]]
    assert module._errors(found, np.array([[2, 0]])) == {"dropped": [[[4e-4] * 3, None]], "beyond": [[0.0, None]]}
    assert found.interval(0, 1, 4) == (0.3, 0.3)


def test_held_out_sequences_drop_what_was_measured() -> None:
    """The mean over heads, in the interval of the measurement. Held-out ones are four times as many."""
    model, task = RunFolder.open("flipflop-tra").load_model(), FlipFlop(length=128)
    windows = (4, 8, 16, 32)
    measured, held_out = (
        measure_dropped_weight(
            model, task_sequences(task, EvalConfig(), count=count, seed=seed).tokens, windows, TOLERANCE
        )
        for count, seed in ((16, 0), (64, 1))
    )
    pooled = measured._replace(weight=measured.weight.mean((1, 2), keepdims=True))
    means = held_out.mean().mean((0, 1))
    assert means[0] > 0.05  # something is dropped at all
    assert all(np.diff(means) < 0)
    for window, mean in zip(windows, means, strict=True):
        low, high = pooled.interval(0, 0, window)
        assert low < mean < high


def run_folder(path: Path, margin: float = 2.0) -> RunFolder:
    """Return an untrained run on text, with windows that differ by head."""
    torch.manual_seed(0)
    config = preset("text-demo").override(["model.d_model=32", "model.n_layers=1", f"model.margin={margin}"])
    run = RunFolder(path)
    run.start(config, resume=False, overwrite=False)
    model = tra.Decoder(config.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.linear.bias"):
                parameter.copy_(torch.tensor([-3.0, 1.0]))
    run.save_weights(model, 0)
    return run


def test_a_calibration_is_written_and_read(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    sequences = text_sequences(Text().stream("valid"), 257, 256, 3)
    assert (sequences.source, [len(row) for row in sequences.tokens]) == ("running text", [256] * 3)
    seen: list[tuple[str, int, int]] = []
    found = calibrate(run, run.load_model(), sequences, 0.01, progress=lambda *what: seen.append(what))
    assert seen == [("alice-valid", done, 3) for done in (1, 2, 3)]
    assert (found.variant, found.queries, found.length) == ("tra, margin 2", 3 * 128, 256)
    for smaller, larger in zip(found.mean_windows[0], found.tail_windows[0], strict=True):
        assert 1 < smaller <= larger
    assert found.windows == found.tail_windows
    assert found.mean_windows[0][0] < found.mean_windows[0][1]  # the head that forgets sooner
    for head in range(2):
        assert found.dropped[0][head][1] <= found.dropped[0][head][0] <= found.dropped[0][head][2] < 0.01  # type: ignore[index]
        assert found.beyond[0][head] <= module.TAIL  # type: ignore[operator]
    write_windows(run.windows_file, found)
    assert read_windows(run.windows_file, run) == found
    by_mean = calibrate(run, run.load_model(), sequences, 0.01, statistic="mean")
    assert by_mean.windows == by_mean.mean_windows == found.mean_windows

    tight = calibrate(run, run.load_model(), sequences._replace(tokens=[row[:16] for row in sequences.tokens]), 1e-9)
    assert tight.open_heads == [[0, 0], [0, 1]]
    assert (tight.windows, tight.dropped) == ([[16, 16]], [[None, None]])


def test_a_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    run, other = run_folder(tmp_path / "run"), run_folder(tmp_path / "other", margin=0.0)
    found = calibrate(run, run.load_model(), text_sequences(Text().stream("valid"), 257, 32, 2), TOLERANCE)
    with pytest.raises(ValueError, match=r"there is no .*windows\.json: tra calibrate .*run measures windows"):
        read_windows(run.windows_file, run)
    write_windows(other.windows_file, found)
    with pytest.raises(ValueError, match=r"was measured on another model than .*other: its config differ"):
        read_windows(other.windows_file, other)  # the weights are the same, but not what is done with them
    retrained = run.load_model()
    torch.nn.init.zeros_(retrained.lm_head.weight)
    run.save_weights(retrained, 1)
    write_windows(run.windows_file, found)
    with pytest.raises(ValueError, match=r"was measured on another model than .*run: its weights differ; calibrate"):
        read_windows(run.windows_file, run)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"windows": [[0, 4]]}, "a window must be a number of at least 1, got 0"),
        ({"windows": [[4.5, 4]]}, "got 4.5"),
        ({"windows": [[True, 4]]}, "got True"),
        ({"tail_windows": [[4]]}, "not those of 1 layers of 2 heads"),
        ({"windows": 3}, "damaged"),
        ({"model": []}, "model must be an object"),
        ({"tolerance": "x"}, "tolerance must be a number"),
        ({"format": 99}, "format 99, this version of tra reads up to 1"),
        ({"format": "x"}, "format must be a number"),
        ({"statistic": ...}, "it has no statistic"),
    ],
)
def test_a_damaged_file_is_one_line(change: dict[str, object], problem: str, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    found = calibrate(run, run.load_model(), text_sequences(Text().stream("valid"), 257, 32, 2), TOLERANCE)
    content = {"format": 1, **dataclasses.asdict(found)} | change
    run.windows_file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    with pytest.raises(ValueError, match=problem) as caught:
        read_windows(run.windows_file, run)
    assert len(str(caught.value).splitlines()) == 1
    run.windows_file.write_text(run.windows_file.read_text()[:-9])
    with pytest.raises(ValueError, match=r"windows\.json is damaged, or not a calibration"):
        read_windows(run.windows_file, run)


def test_an_unfinished_run_has_no_identity(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    run.weights_file.unlink()
    with pytest.raises(ValueError, match="the run hasn't ended"):
        model_identity(run)


def test_sequences_are_documents_where_they_are_long_enough() -> None:
    tokens = np.arange(300) % 7
    documents = np.array([[0, 1, 1], [120, 1, 1], [150, 1, 1], [160, 1, 1]])
    stream = Stream("text", tokens, documents, "bytes", 256)
    found = text_sequences(stream, 7, 100, 2)
    assert found.source == "documents"
    assert [row.tolist() for row in found.tokens] == [tokens[start : start + 100].tolist() for start in (0, 160)]
    assert text_sequences(stream, 7, 100, 3).source == "running text"
    assert len(text_sequences(stream, 7).tokens) == 9  # of 32 tokens
    chosen = [np.stack(text_sequences(stream, 7, 8, 5, seed).tokens).tolist() for seed in (0, 0, -1)]
    assert chosen[0] == chosen[1] != chosen[2]
    with pytest.raises(ValueError, match="text has 300 tokens: a calibration needs at least 2 sequences of 200"):
        text_sequences(stream, 7, 200)
    for length, count in ((7, 4), (100, 1), (-1, 4)):
        with pytest.raises(ValueError, match="at least 2 sequences of at least 8 tokens"):
            text_sequences(stream, 7, length, count)
    with pytest.raises(ValueError, match=r"holds the id 6, outside of the vocabulary's 0\.\.5"):
        text_sequences(stream, 6, 100)


def test_sequences_of_a_task_have_no_padding() -> None:
    task = Copy(longest=10)
    found = task_sequences(task, EvalConfig(), count=5)
    padding = task.vocabulary.index("<pad>")
    assert all(padding not in row for row in found.tokens)
    assert len({len(row) for row in found.tokens}) > 1
    with pytest.raises(ValueError, match="at least 2 sequences, got 1"):
        task_sequences(task, EvalConfig(), count=1)


@pytest.mark.parametrize("tolerance", [0.0, -1.0, 1.0, math.nan, math.inf])
def test_a_tolerance_lies_between_0_and_1(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must lie above 0 and below 1, got"):
        measure_dropped_weight(tra.Decoder(tra.DecoderConfig.tiny(5)), [], (1,), tolerance)


def test_only_tra_has_windows() -> None:
    with pytest.raises(ValueError, match="rope has no windows to calibrate: they are measured for TRA"):
        measure_dropped_weight(tra.Decoder(tra.DecoderConfig.tiny(5, mechanism="rope")), [], (1,), TOLERANCE)


def test_attention_that_is_not_a_number_is_refused() -> None:
    model = tra.Decoder(tra.DecoderConfig.tiny(5))
    torch.nn.init.constant_(model.embed_tokens.weight, math.nan)
    with pytest.raises(ValueError, match="attention is not a number"):
        measure_dropped_weight(model, [np.zeros(8, dtype=np.int64)], (1,), TOLERANCE)
