"""The two failures, against counts by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tra
from tests.slow import slow
from tra.attention import MECHANISMS, Attention, WeightMap
from tra.config import EvalConfig
from tra.evaluation import diagnosis as module
from tra.evaluation.diagnosis import BLOCK, Diagnosis, diagnose_run, diagnose_task, diagnose_text, measure_layer
from tra.presets import preset
from tra.runs import RunFolder, mean_over_heads, read_rows
from tra.tasks import FlipFlop
from tra.text.task import Stream
from tra.training import train

LENGTH = 12
QUICK = ("tra", "forgetting", "rope", "sinusoidal")
OTHERS = [name for name in MECHANISMS if name not in (*QUICK, "lstm")]
Measure = tuple[Tensor, Tensor]


class Known(nn.Module):
    """A layer with one head whose map is given."""

    def __init__(self, weights: Tensor, content: Tensor, logits: Tensor) -> None:
        super().__init__()
        self.found = WeightMap(*(x[None, None] for x in (weights, content, logits)))

    def attention_map(self, x: Tensor, key_mask: Tensor | None = None, rows: Tensor | None = None) -> WeightMap:
        assert rows is not None
        return WeightMap(*(y[:, :, rows] for y in self.found))


def test_by_hand() -> None:
    """One query over four keys, content 2, -1, 0.5, -3; every pair once."""
    content = torch.tensor([[2.0, -1.0, 0.5, -3.0]])
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    weights = torch.tensor([[0.1, 0.3, 0.6, 0.0]])
    pairs = torch.tensor([[[0, 0, 0, 1, 1, 2]], [[1, 2, 3, 2, 3, 3]]])
    found = measure_layer(Known(weights, content, logits), torch.zeros(1, 4, 8), torch.tensor([0]), pairs)  # type: ignore[arg-type]
    ratios = {name: float(part / whole) for name, (part, whole) in found.items()}
    # (0, 1) and (0, 2) stand the wrong way round; of the pairs with both signs, (0, 1), (0, 3), (1, 2), (2, 3), one.
    # Of the three pairs without the dropped key, the same two.
    expected = {"negative_mass": 0.3, "reversed": 2 / 6, "lifted": 1 / 4, "reversed_kept": 2 / 3}
    assert ratios == pytest.approx(expected)


def test_ties_and_null_rows_do_not_count() -> None:
    zeros = torch.zeros(2, 3)
    dropped = torch.full((2, 3), -torch.inf)
    layer, rows, pairs = Known(zeros, zeros, dropped), torch.tensor([0, 1]), torch.zeros(2, 2, 5).long()
    found = measure_layer(layer, torch.zeros(1, 3, 8), rows, pairs)  # type: ignore[arg-type]
    assert all(float(whole) == 0 for _, whole in found.values())


def decoder(mechanism: str, gate_bias: float = 0.0, margin: float = 0.0) -> tra.Decoder:
    torch.manual_seed(0)
    config = tra.DecoderConfig(5, d_model=32, n_layers=2, n_heads=4, mechanism=mechanism, embedding_init="normal")
    model = tra.Decoder(dataclasses.replace(config, gate_bias=gate_bias, margin=margin))
    for name, weight in model.named_parameters():
        if name.endswith("self_attn.embedding"):  # cope's, which start at 0
            nn.init.normal_(weight)
    return model


def diagnose(mechanism: str, margin: float = 0.0) -> list[Diagnosis]:
    task = FlipFlop(length=LENGTH)
    return list(diagnose_task(decoder(mechanism, margin=margin), task, EvalConfig(), splits=("iid", "4x")))


@pytest.mark.parametrize("mechanism", [*QUICK, *slow(*OTHERS)])
def test_what_must_be_so(mechanism: str) -> None:
    """Whatever the weights: no position reverses nothing, a threshold leaves no mass below it."""
    for row in diagnose(mechanism):
        negative, lifted = mean_over_heads(row.negative_mass), mean_over_heads(row.lifted)
        assert negative is not None
        thresholded = mechanism in ("tra", "tra-threshold-only", "tra-plain-distance")
        assert (negative == 0) == thresholded
        assert (row.kept is not None) == (row.null is not None) == thresholded
        gated = mechanism in ("forgetting", "tra", "tra-distance-only", "tra-plain-distance")
        assert (row.log_forget is not None) == gated
        assert (row.reach is not None) == (mechanism in ("tra", "tra-threshold-only"))
        if mechanism in ("sinusoidal", "differential"):
            assert row.reversed is row.reversed_kept is row.lifted is None
        elif mechanism in ("nope", "tra-threshold-only"):
            assert mean_over_heads(row.reversed) == 0
        else:
            assert (mean_over_heads(row.reversed) or 0) > 0
        if thresholded:
            assert lifted == 0


@pytest.mark.parametrize("mechanism", ["tra", "tra-plain-distance"])
@pytest.mark.parametrize("margin", [0.5, math.inf])
def test_a_margin_shows(mechanism: str, margin: float) -> None:
    """Keys of negative score stay, and so have weight; TRA counts as many as without a margin."""
    plain, found = (diagnose(mechanism, margin=each)[1] for each in (0.0, margin))
    kept, without = mean_over_heads(found.kept), mean_over_heads(plain.kept)
    assert kept is not None
    assert without is not None
    assert kept > without + 0.05
    assert (kept == 1) == (mean_over_heads(found.null) == 0) == (margin == math.inf)
    assert (mean_over_heads(found.negative_mass) or 0) > 0.01
    if mechanism == "tra":
        assert plain.counted == plain.kept
        assert found.counted is not None
        first_layer = np.array(found.counted[0])  # whose input doesn't depend on the margin
        assert np.array_equal(first_layer, np.array(plain.counted[0]))  # type: ignore[index]
        assert (mean_over_heads(found.counted) or 1) < kept
        reaches = [mean_over_heads(row.reach) or 0.0 for row in (plain, found)]
        assert 1 <= reaches[0] <= reaches[1]
    else:
        assert plain.counted is found.counted is None


def test_negative_mass_and_order_by_hand_with_a_margin() -> None:
    """One query whose scores are 2, -0.7 and 1: all stay, and of the two that count one stands right of the others."""
    layer = tra.ThresholdRelativeAttention(2, 1, margin=1.5, threshold=0.6, qk_norm=False, gate_bias=0.0).double()
    with torch.no_grad():
        layer.gate.linear.weight.zero_()  # δ = log 1/2
        layer.q_proj.weight.copy_(torch.eye(2))
        layer.k_proj.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    # The last query is (0.5, 1), and keys are tokens with their two numbers swapped; the factor undoes the scale.
    x = torch.tensor([[[2.0, 0.0], [-0.7, 0.0], [0.5, 1.0]]], dtype=torch.float64) * 2**0.25
    content = [1.0 * 2.0, 1.0 * -0.7, 0.5 * 1 + 1.0 * 0.5]
    found = layer.attention_map(x, rows=torch.tensor([2]))
    assert found.content[0, 0, 0].tolist() == pytest.approx(content)
    delta = math.log(0.5)
    logits = [2.0 + 2 * delta, -0.7 + 2 * delta, 1.0 + delta]
    assert found.logits[0, 0, 0].tolist() == pytest.approx(logits)
    pairs = torch.tensor([[[0, 0, 1]], [[1, 2, 2]]])
    with torch.no_grad():
        measured = measure_layer(layer, x, torch.tensor([2]), pairs)
    ratios = {name: float(part / whole) for name, (part, whole) in measured.items()}
    weights = [math.exp(logit) for logit in logits]
    assert ratios["negative_mass"] == pytest.approx(weights[1] / sum(weights))
    assert (ratios["reversed"], ratios["reversed_kept"], ratios["lifted"]) == (0, 0, 0)
    assert (ratios["kept"], ratios["counted"], ratios["null"]) == (1, pytest.approx(2 / 3), 0)


def test_lstm_has_no_attention() -> None:
    with pytest.raises(ValueError, match="lstm has no attention to diagnose"):
        diagnose("lstm")


def test_reach_is_where_the_walk_may_stop() -> None:
    """Everything left of it weighs less than the tolerance, and one token nearer it can't be known yet."""
    layer = tra.ThresholdRelativeAttention(32, 4, gate_bias=-2.0).double()
    torch.manual_seed(1)
    x, rows = torch.randn(1, 200, 32).double(), torch.tensor([5, 120, 199])
    found = layer.attention_map(x, rows=rows)
    reach = layer.reach(x, found.logits, rows)[0]
    assert reach.min() >= 1
    assert reach[:, 0].max() <= 6
    assert reach[:, 1:].max() < 120
    for head in range(4):
        for index, row in enumerate(rows.tolist()):
            beyond = found.weights[0, head, index, : row + 1 - int(reach[head, index])]
            assert float(beyond.sum()) <= 2**-53


def test_longer_reach_with_slower_forgetting() -> None:
    torch.manual_seed(1)
    x, rows = torch.randn(1, 200, 32), torch.tensor([199])
    reaches = []
    for bias in (-2.0, 0.0, 2.0):
        torch.manual_seed(0)
        layer = tra.ThresholdRelativeAttention(32, 4, gate_bias=bias)
        reaches.append(float(layer.reach(x, layer.attention_map(x, rows=rows).logits, rows).mean()))
    assert reaches == sorted(reaches)
    assert reaches[0] < reaches[2]


def test_results_are_kept_once_per_split(tmp_path: Path) -> None:
    config = preset("demo").override(["train.steps=2", "model.d_model=16", "task.arguments.length=12"])
    train(config, tmp_path / "run", device=torch.device("cpu"))
    run, task = RunFolder(tmp_path / "run"), config.task.build()
    for splits in (("iid",), ("dense", "iid")):
        list(diagnose_run(run, diagnose_task(run.load_model(), task, config.evaluate, splits=splits)))
    rows = read_rows(run.diagnosis_file)
    assert [row["split"] for row in rows] == ["dense", "iid"]
    assert {field.name for field in dataclasses.fields(Diagnosis)} == set(rows[0])
    assert json.loads(json.dumps(rows)) == rows


def test_the_same_sequences_and_queries_for_every_mechanism() -> None:
    one, other = (diagnose(name)[0] for name in ("tra", "rope"))
    assert (one.queries, one.sequences) == (other.queries, other.sequences)


def text(length: int) -> Stream:
    tokens = np.append(4, np.random.default_rng(0).integers(0, 4, length - 1)).astype(np.uint16)
    return Stream("drawn", tokens, np.array([[0, length - 1, -1]]), "bytes", 4)


def test_walked_is_what_a_block_of_queries_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest key that every row of the block can stop at, row by row, over all blocks of three windows."""
    monkeypatch.setattr(module, "WINDOWS_OF_TEXT", 3)
    monkeypatch.setattr(module, "BLOCKS", 10**6)
    model, stream, window = decoder("tra", gate_bias=-1.0), text(1000), 300
    (found,) = diagnose_text(model, stream, (window,))
    read, behind = np.zeros((2, 4)), 0
    for start in (0, 349, 699):
        tokens = torch.from_numpy(stream.tokens[start : start + window].astype(np.int64))[None]
        for layer, (attention, x) in enumerate(model.attention_inputs(tokens)):
            for first in range(0, window - 63, 64):
                needed = [first] * 4
                for row in range(first, first + 64):
                    rows = torch.tensor([row])
                    reach = attention.reach(x, attention.attention_map(x, rows=rows).logits, rows)[0, :, 0]
                    needed = [min(key, row - int(back) + 1) for key, back in zip(needed, reach, strict=True)]
                read[layer] += [first + 64 - key for key in needed]
        behind += 64 + 128 + 192 + 256
    assert found.walked is not None
    assert np.array(found.walked) == pytest.approx(read / behind, abs=1e-6)  # kept to six digits
    assert 0.2 < read.mean() / behind < 0.95  # it stops early, but not at once


def test_text_is_looked_at_in_blocks_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def spy(layer: Attention, x: Tensor, rows: Tensor, pairs: Tensor, block: int | None) -> dict[str, Measure]:
        assert block == BLOCK == 64
        assert pairs.shape == (2, len(rows), module.PAIRS)
        assert (pairs <= rows[:, None]).all()
        seen.append(rows)
        return measure_layer(layer, x, rows, pairs, block)

    monkeypatch.setattr(module, "measure_layer", spy)
    (found,) = diagnose_text(decoder("rope"), text(2000), (400,))
    assert (found.split, found.shortest, found.longest) == ("drawn/400", 400, 400)
    assert (found.sequences, found.queries) == (8, 8 * 4 * 64)
    assert len(seen) == 8 * 2
    for rows in seen:
        blocks = rows.view(4, 64)
        assert (blocks.diff() == 1).all()
        assert (blocks[:, 0] % 64 == 0).all()
        assert len(set(blocks[:, 0].tolist())) == 4
        assert rows.max() < 400
    assert len({tuple(rows.tolist()) for rows in seen}) > 4  # other blocks in other windows


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name != "lstm"])
def test_measures_of_text_are_those_the_mechanism_has(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOWS_OF_TEXT", 2)
    (found,) = diagnose_text(decoder(mechanism), text(300), (64,))
    thresholded = mechanism in ("tra", "tra-threshold-only", "tra-plain-distance")
    assert (found.kept is not None) == (found.null is not None) == thresholded
    assert (found.walked is not None) == (found.reach is not None) == (mechanism in ("tra", "tra-threshold-only"))


def test_tasks_are_not_walked() -> None:
    """Their queries are not neighbours."""
    assert diagnose("tra")[0].walked is None


def test_text_of_one_run_is_kept_by_window(tmp_path: Path) -> None:
    run, stream = RunFolder(tmp_path), text(300)
    for windows in ((64, 128), (64,)):
        list(diagnose_run(run, diagnose_text(decoder("nope"), stream, windows)))
    rows = read_rows(run.diagnosis_file)
    assert [row["split"] for row in rows] == ["drawn/128", "drawn/64"]
    assert json.loads(json.dumps(rows)) == rows


def test_bad_text() -> None:
    for window in (63, 300):
        with pytest.raises(ValueError, match=f"takes windows of 64 up to 299 tokens of drawn, got {window}"):
            next(diagnose_text(decoder("tra"), text(300), (window,)))
    with pytest.raises(ValueError, match="lstm has no attention to diagnose"):
        next(diagnose_text(decoder("lstm"), text(300), (64,)))
