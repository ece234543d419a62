"""Training on a CUDA device: the captured step is the plain step, and a resumed run goes on."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest
import torch

from tra.ops import choice
from tra.presets import preset
from tra.runs import RunFolder, read_rows
from tra.tasks import TASKS, generator
from tra.training import Progress, Trainer, train
from tra.training.checkpoint import load_tensors

pytestmark = pytest.mark.gpu

SMALL = ("train.batch_size=16", "train.log_every=5", "train.steps=30", "task.arguments.length=32", "model.d_model=32")


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl")]


@pytest.mark.parametrize("mechanism", ["tra", "rope"])
def test_the_captured_step_is_the_plain_step(tmp_path: Path, mechanism: str) -> None:
    cuda = torch.device("cuda")
    for compile in ("on", "off"):
        config = preset("demo").override(
            [*SMALL, f"train.compile={compile}", f"model.mechanism={mechanism}", "train.precision=float32",
             "train.accumulate=2"]
        )  # fmt: skip
        train(config, tmp_path / compile, device=cuda)
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), rel=2e-3)


def test_dropout_differs_from_step_to_step_in_a_captured_graph(tmp_path: Path) -> None:
    """The same batch at rate 0 over and over: only dropout moves the loss."""
    config = preset("demo").override([*SMALL, "model.dropout=0.3", "optim.lr=1e-30"])
    (tmp_path / "run").mkdir()
    trainer = Trainer(config, RunFolder(tmp_path / "run"), torch.device("cuda"))
    batch, seen = trainer.next_batch(), []
    for step in (0, 1, 2, 0):
        trainer.step = step
        trainer.window.zero_()
        trainer.optimise(batch)
        seen.append(float(trainer.window[0]))
    assert len(set(seen[:3])) == 3
    assert seen[3] == pytest.approx(seen[0], rel=1e-5)


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    config, cuda = preset("demo").override([*SMALL, "model.dropout=0.1"]), torch.device("cuda")
    train(config, tmp_path / "whole", device=cuda)

    def stop(progress: Progress) -> None:
        if progress.step == 13 and progress.message is None:
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(config, tmp_path / "cut", device=cuda, progress=stop) == (13, "SIGTERM")
    assert train(None, tmp_path / "cut", resume=True, device=cuda).done
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=2e-3)
    one, other = (load_tensors(tmp_path / name / "model.safetensors")[0] for name in ("whole", "cut"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", TASKS)
def test_sampling_is_reproducible(name: str) -> None:
    task = TASKS[name]()
    first, again = (task.sample("train", 32, generator(1, "train", 2, "cuda"), "cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first.tokens.device.type == "cuda"


def test_a_short_training_curve_is_the_reference_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearer to it, on average, than a run from another seed is."""

    def curve(name: str, seed: int) -> list[float]:
        config = preset("flipflop").override(["train.steps=400", "train.log_every=10", f"train.seed={seed}"])
        train(config, tmp_path / name, device=torch.device("cuda"))
        return losses(tmp_path / name)

    def apart(a: list[float], b: list[float]) -> float:
        return sum(abs(math.log(x / y)) for x, y in zip(a, b, strict=True)) / len(a)

    kernels = curve("kernels", 0)
    monkeypatch.setattr(choice, "auto_takes_triton", lambda *_: False)
    reference, other_seed = curve("reference", 0), curve("other-seed", 1)
    assert apart(kernels, reference) < apart(reference, other_seed)
