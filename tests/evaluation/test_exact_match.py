"""Evaluation: what is counted, on which sequences, and how sure one may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tra.config import EvalConfig
from tra.evaluation.exact_match import draw_test_set, evaluate_rows, evaluate_run, evaluate_task
from tra.presets import preset
from tra.runs import SHIPPED, RunFolder, read_rows, wilson_interval
from tra.tasks import FlipFlop, generator
from tra.training import train

CPU = torch.device("cpu")


class Oracle(nn.Module):
    """Reads the memory off the sequence by brute force, but forgets writes more than `reach` symbols back."""

    def __init__(self, reach: int = 10**9) -> None:
        super().__init__()
        self.reach = reach

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 5)
        for row in range(tokens.shape[0]):
            memory, written = 3, -(10**9)
            for place in range(0, tokens.shape[1], 2):
                if tokens[row, place] == 0:
                    memory, written = int(tokens[row, place + 1]), place
                near = place - written <= self.reach
                logits[row, place, memory if near else 7 - memory] = 1.0  # the other bit when too far
        return logits


def test_wilson_interval_by_hand() -> None:
    """Newcombe 1998: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(20, 20)[1] == 1.0


def test_a_perfect_reader_scores_one() -> None:
    task = FlipFlop(length=32)
    for result in evaluate_task(Oracle(), task, EvalConfig(examples=40), splits=("iid", "sparse", "4x")):
        assert (result.exact, result.token_accuracy, result.examples) == (1.0, 1.0, 40)
        assert result.high == 1.0


def test_a_short_memory_is_counted_sequence_by_sequence() -> None:
    task = FlipFlop(length=32)
    (result,) = evaluate_task(Oracle(reach=24), task, EvalConfig(examples=60), splits=("sparse",))
    wrong_rows = wrong = scored = 0
    for batch in draw_test_set(task, "sparse", 60, 0, 60, CPU):
        for row in batch.tokens.tolist():
            errors = 0
            for place in range(0, 32, 2):
                if row[place] == 1:
                    written = max(p for p in range(0, place, 2) if row[p] == 0)
                    errors += place - written > 24
                    scored += 1
            wrong += errors
            wrong_rows += errors > 0
    assert 0 < wrong_rows < 60
    assert result.exact == pytest.approx(1 - wrong_rows / 60)
    assert result.token_accuracy == pytest.approx(1 - wrong / scored)
    assert result.tokens == scored


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_the_test_set_does_not_depend_on_the_batch(rows: int) -> None:
    task = FlipFlop(length=16)
    drawn = torch.cat([batch.tokens for batch in draw_test_set(task, "iid", 300, 5, rows, CPU)])
    whole = torch.cat([batch.tokens for batch in draw_test_set(task, "iid", 300, 5, 10**6, CPU)])
    assert len(drawn) == 300
    assert torch.equal(drawn, whole)


def test_training_never_sees_the_test_set() -> None:
    task = FlipFlop(length=64)
    trained = {
        tuple(row) for i in range(5) for row in task.sample("train", 1024, generator(0, "train", i)).tokens.tolist()
    }
    tested = {tuple(row) for batch in draw_test_set(task, "iid", 512, 0, 512, CPU) for row in batch.tokens.tolist()}
    assert not trained & tested


def test_results_are_kept_once_per_split(tmp_path: Path) -> None:
    config = preset("demo").override(["train.steps=2", "model.d_model=16", "task.arguments.length=16"])
    train(config, tmp_path / "run", device=CPU)
    run, task = RunFolder(tmp_path / "run"), config.task.build()
    for splits in (("iid",), ("dense", "iid")):
        results = evaluate_task(run.load_model(), task, config.evaluate, splits=splits, examples=10)
        assert len(list(evaluate_run(run, results))) == len(splits)
    assert [row["split"] for row in read_rows(run.evaluation_file)] == ["dense", "iid"]


def test_rows_of_a_file(tmp_path: Path) -> None:
    task, file = FlipFlop(length=16), tmp_path / "rows.txt"
    tokens = task.sample("iid", 9, generator(0, "x")).tokens
    file.write_text("\n".join(task.render(row) for row in tokens))
    result = evaluate_rows(Oracle(), task, file, EvalConfig(), device=CPU)
    assert (result.exact, result.examples, result.split, result.longest) == (1.0, 9, "rows.txt", 16)


def test_the_shipped_run_works_at_once() -> None:
    """Trained to 1.0 on all three sets; a few sequences of each show that the file is what it says."""
    run = RunFolder.open("flipflop-tra")
    assert run.path == SHIPPED / "flipflop-tra"
    model = run.load_model()
    assert sum(p.numel() for p in model.parameters()) == 2_636_560
    config = run.config()
    for result in evaluate_task(
        model, config.task.build(), config.evaluate, splits=("iid", "sparse", "dense"), examples=8
    ):
        assert result.exact == 1.0, result.split


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a run folder .*ship with the package: flipflop-tra"):
        RunFolder.open(tmp_path)
    with pytest.raises(ValueError, match="did you mean 'sparse'"):
        next(evaluate_task(Oracle(), FlipFlop(), EvalConfig(), splits=("sprse",)))
    with pytest.raises(ValueError, match="at least 1"):
        next(evaluate_task(Oracle(), FlipFlop(), EvalConfig(), examples=0))
