"""Training on text: it learns, it can be cut off, and the loss of a large vocabulary is the plain one."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.test_trainer import assert_same_run
from tra.config import RunConfig
from tra.model import Decoder, DecoderConfig
from tra.presets import preset
from tra.runs import RunFolder, read_rows
from tra.tasks import Batch
from tra.text import load_tokenizer
from tra.text.store import StoreWriter, TokenPart
from tra.text.task import Text
from tra.text.windows import windows_per_epoch
from tra.training import Progress, train
from tra.training import loss as loss_module
from tra.training.optimizer import adamw
from tra.training.step import make_step

CPU = torch.device("cpu")
SMALL = ("model.d_model=64", "model.n_layers=1", "task.arguments.window=64", "train.batch_size=16", "optim.lr=1e-2")


def small(*changes: str) -> RunConfig:
    return preset("text-demo").override([*SMALL, *changes])


def test_it_learns(tmp_path: Path) -> None:
    """More than how often each byte occurs, so something of what stood before."""
    config = small("train.steps=60", "train.log_every=20")
    train(config, tmp_path / "run", device=CPU)
    task = config.task.build()
    assert isinstance(task, Text)
    shares = np.bincount(task.stream("train").tokens) / len(task.stream("train").tokens)
    entropy = -float((shares[shares > 0] * np.log(shares[shares > 0])).sum())
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["loss"] > entropy
    assert rows[-1]["loss"] < entropy - 0.3


def test_stopping_and_resuming_over_epochs_changes_nothing(tmp_path: Path) -> None:
    """Data of 62 windows, so that a run of 40 steps sees it five times, and two draws."""
    with StoreWriter(tmp_path / "store", load_tokenizer("bytes")) as writer:
        writer.add(TokenPart(True, np.random.default_rng(0).integers(0, 256, 1010), 1010, 1))
        writer.seal([])
    assert windows_per_epoch(1011, 16) == 62
    data = (f"task.arguments.data={tmp_path / 'store'}", "task.arguments.window=16", "train.batch_size=8")
    config = small(*data, "train.steps=40", "model.d_model=32", "model.dropout=0.1", "train.log_every=5")
    train(config, tmp_path / "whole", device=CPU)
    folder = tmp_path / "pieces"
    for stop in (3, 8, 31, 32, 33):

        def let(progress: Progress, stop: int = stop) -> None:
            if progress.step == stop and progress.message is None:
                os.kill(os.getpid(), signal.SIGTERM)

        assert train(config, folder, resume=True, device=CPU, progress=let) == (stop, "SIGTERM")
    assert train(None, folder, resume=True, device=CPU).done
    assert_same_run(tmp_path / "whole", folder)


def a_step(config: RunConfig, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Counts and gradients of a model's first step."""
    torch.manual_seed(0)
    model = Decoder(config.model)
    step = make_step(model, adamw(model, config.optim, CPU), config, batch.tokens.shape[1], CPU)
    counts = step(batch)
    return counts, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def exact_step(config: RunConfig, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients in float64."""
    torch.manual_seed(0)
    model = Decoder(config.model).double()
    logits = model(batch.tokens)
    loss = F.cross_entropy(logits[batch.loss_mask], batch.targets[batch.loss_mask])
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Over all numbers together, each relative to its tensor: a bias of two alone would say nothing about rounding."""
    pairs = zip(found, exact, strict=True)
    return float(torch.cat([((a - b) / b.square().mean().sqrt()).flatten() for a, b in pairs]).square().mean().sqrt())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("vocabulary", "switch"), [(320, 1), (4096, loss_module.LARGE_VOCABULARY)])
def test_a_large_vocabulary_s_step_is_the_plain_one(
    vocabulary: int, switch: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same counts; loss and gradients with at most twice the plain path's error against float64."""
    torch.manual_seed(1)
    tokens, targets = torch.randint(vocabulary, (2, 6, 33))
    batch = Batch(tokens, targets, torch.rand(6, 33) < 0.7)
    config = dataclasses.replace(
        small("optim.clip=null", f"train.accumulate={accumulate}", "train.batch_size=6"),
        model=DecoderConfig(vocabulary, d_model=32, n_layers=2, n_heads=2),
    )
    monkeypatch.setattr(loss_module, "LARGE_VOCABULARY", vocabulary + 1)
    plain = a_step(config, batch)
    monkeypatch.setattr(loss_module, "LARGE_VOCABULARY", switch)
    monkeypatch.setattr(loss_module, "masked_cross_entropy", None)  # so that the other path is sure to be taken
    large = a_step(config, batch)
    exact = exact_step(config, batch)
    assert torch.equal(plain[0][1:], large[0][1:])
    assert error(large[1], exact[1]) <= 2 * error(plain[1], exact[1])
    one_rounding = torch.finfo(torch.float32).eps
    assert error([large[0][0]], [exact[0]]) <= max(2 * error([plain[0][0]], [exact[0]]), one_rounding)


def test_what_is_not_scored_may_be_any_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "LARGE_VOCABULARY", 1)
    mask = torch.tensor([[True, False, True]])
    steps = [
        a_step(small("model.d_model=32"), Batch(torch.tensor([[1, 2, 3]]), torch.tensor([[2, ignored, 4]]), mask))
        for ignored in (3, -100)
    ]
    assert torch.equal(steps[0][0], steps[1][0])
    assert all(torch.equal(*pair) for pair in zip(steps[0][1], steps[1][1], strict=True))


@pytest.mark.slow
def test_a_language_model_from_start_to_maps(tmp_path: Path) -> None:
    """Training, perplexity at two windows and overlaps, losses, maps and diagnosis, by the command."""

    def tra(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tra", *arguments, "--device", "cpu"]
        environment = os.environ | {"COLUMNS": "160"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done

    tra("train", "--preset", "text-demo", *SMALL, "train.steps=3", "--out", "run")
    asked = ("evaluate", "run", "--windows", "32", "128", "--overlap", "none", "half", "--losses", "--maps", "2")
    rows = [json.loads(line) for line in tra(*asked, "--diagnose", "--json").stdout.splitlines()]
    run = RunFolder(tmp_path / "run")
    perplexities, diagnoses = read_rows(run.perplexity_file), read_rows(run.diagnosis_file)
    assert rows == perplexities + diagnoses
    assert [(row["window"], row["overlap"]) for row in perplexities] == [
        (32, "none"),
        (128, "none"),
        (32, "half"),
        (128, "half"),
    ]
    assert [row["split"] for row in diagnoses] == ["alice-valid/128"]  # 32 is less than a block
    with np.load(run.path / "losses-alice-valid.npz") as arrays:
        assert set(arrays) == {"32/none", "128/none", "32/half", "128/half"}
    with np.load(run.path / "maps-alice-valid.npz") as arrays:
        assert arrays["maps"].shape == (2, 1, 2, 256, 256)
    shown = tra("evaluate", "run", "--windows", "64", "--diagnose").stdout
    assert "bits a byte" in shown
    assert "walked" in shown
    assert f"alice-valid, 64: {read_rows(run.perplexity_file)[-1]['perplexity']:.3f}" in shown
