"""One run: it learns, it can be cut off anywhere and go on, and nothing is lost."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tra.config import RunConfig
from tra.model import MLP, Decoder
from tra.presets import preset
from tra.runs import RunFolder, read_rows
from tra.tasks import generator
from tra.training.checkpoint import checkpoints, load_checkpoint, load_tensors, save_checkpoint
from tra.training.optimizer import adamw
from tra.training.start import train
from tra.training.step import make_step
from tra.training.trainer import STEPS_PER_DRAW, Progress

SMALL = (
    "model.d_model=32",
    "model.n_layers=1",
    "task.arguments.length=16",
    "train.batch_size=8",
    "train.log_every=5",
    "train.checkpoint_every=10",
    "model.dropout=0.1",
)


def small(*changes: str) -> RunConfig:
    return preset("demo").override([*SMALL, *changes])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_tensors(folder / "model.safetensors")[0]


def assert_same_run(one: Path, other: Path) -> None:
    """Weights to the bit, and the same metrics but for the clock."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    logs = [
        [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in read_rows(folder / "metrics.jsonl")]
        for folder in (one, other)
    ]
    assert logs[0] == logs[1]


def test_a_run_is_a_folder(tmp_path: Path) -> None:
    seen: list[Progress] = []
    result = train(small("train.steps=25"), tmp_path / "run", device=torch.device("cpu"), progress=seen.append)
    assert result == (25, "done")
    assert [p.step for p in seen] == list(range(1, 26))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "environment.json", "metrics.jsonl", "checkpoints", "model.safetensors", "lock"}
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [5, 10, 15, 20, 25]
    for row in rows:
        assert row["loss"] > 0
        assert 0 <= row["accuracy"] <= 1
        assert len(row["kept"]) == len(row["null"]) == 1
        assert len(row["kept"][0]) == 2
    session = json.loads((tmp_path / "run" / "environment.json").read_text())["sessions"][0]
    assert session["torch"] == torch.__version__
    model = RunFolder(tmp_path / "run").load_model()
    assert all(torch.equal(value, weights(tmp_path / "run")[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    """A small task to the end, with the mechanism that learns it soonest; the demo's test trains TRA."""
    changes = ["model.mechanism=rope", "task.arguments.length=16", "train.steps=300"]
    train(preset("demo").override(changes), tmp_path / "run", device=torch.device("cpu"))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["exact"] < 0.8
    assert rows[-1]["exact"] > 0.95


def test_a_dead_head_is_seen(tmp_path: Path) -> None:
    """Weights of a head that never keeps a key, put into a checkpoint, show up in the next log line."""
    folder = tmp_path / "run"
    train(small("train.steps=15"), folder, device=torch.device("cpu"))
    config = small("train.steps=15", "optim.lr=1e-9")
    state = load_checkpoint(folder / "checkpoints")
    assert state is not None
    state.tensors["model.embed_tokens.weight"].abs_()
    state.tensors["model.layers.0.input_layernorm.weight"].fill_(1.0)
    state.tensors["model.layers.0.self_attn.q_proj.weight"][:16] = 1.0
    state.tensors["model.layers.0.self_attn.k_proj.weight"][:16] = -1.0
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_checkpoint(folder / "checkpoints", state)
    train(None, folder, resume=True, device=torch.device("cpu"))
    assert read_rows(folder / "metrics.jsonl")[-1]["dead_heads"] == ["0.0"]


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_is_the_same_step(accumulate: int) -> None:
    config = small("model.dropout=0.0")
    results = []
    for pieces in (1, accumulate):
        torch.manual_seed(0)
        model = Decoder(config.model)
        optimizer = adamw(model, config.optim, torch.device("cpu"))
        whole = config.override([f"train.accumulate={pieces}", "optim.clip=0.1"])
        step = make_step(model, optimizer, whole, 16, torch.device("cpu"))
        batch = config.task.build().sample("train", 8, generator(0, "train"))
        counts = step(batch)
        results.append((counts, *(p.grad for p in model.parameters())))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    assert float(torch.stack([g.square().sum() for g in results[0][1:]]).sum().sqrt()) <= 0.1 + 1e-6


def test_checkpointed_activations_change_no_bit(tmp_path: Path) -> None:
    """Dropout included, which is drawn again as it was."""
    for setting in ("true", "false"):
        changes = ("train.steps=10", f"train.checkpoint_activations={setting}")
        train(small(*changes), tmp_path / setting, device=torch.device("cpu"))
    assert_same_run(tmp_path / "true", tmp_path / "false")


def test_bfloat16_trains(tmp_path: Path) -> None:
    train(small("train.steps=5", "train.precision=bfloat16"), tmp_path / "run", device=torch.device("cpu"))
    assert weights(tmp_path / "run")["lm_head.weight"].dtype == torch.float32


@pytest.mark.slow
def test_compiled_training_follows_the_plain_one(tmp_path: Path) -> None:
    for compile in ("on", "off"):
        changes = ("train.steps=10", f"train.compile={compile}", "model.dropout=0.0")
        train(small(*changes), tmp_path / compile, device=torch.device("cpu"))
    losses = [[row["loss"] for row in read_rows(tmp_path / c / "metrics.jsonl")] for c in ("on", "off")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_stopping_and_resuming_at_any_step_changes_nothing(tmp_path: Path) -> None:
    """In one process, by SIGTERM, which is obeyed between two steps."""
    config = small("train.steps=23")
    train(config, tmp_path / "whole", device=torch.device("cpu"))

    stops = iter([3, 4, 11, 17])
    folder = tmp_path / "pieces"
    for stop in stops:

        def let(progress: Progress, stop: int = stop) -> None:
            if progress.step == stop and progress.message is None:
                os.kill(os.getpid(), signal.SIGTERM)

        result = train(config, folder, resume=True, device=torch.device("cpu"), progress=let)
        assert result == (stop, "SIGTERM")
    assert train(None, folder, resume=True, device=torch.device("cpu")).done
    assert_same_run(tmp_path / "whole", folder)
    assert len(json.loads((folder / "environment.json").read_text())["sessions"]) == 5


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    train(small("train.steps=5"), tmp_path / "run", device=torch.device("cpu"))
    before = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns
    assert train(None, tmp_path / "run", resume=True, device=torch.device("cpu")).done
    assert (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns == before


def test_folders_are_never_overwritten_by_chance(tmp_path: Path) -> None:
    folder, cpu = tmp_path / "run", torch.device("cpu")
    train(small("train.steps=5"), folder, device=cpu)
    for options, message in (
        ({}, "exists already: use --resume to go on, --overwrite"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
    ):
        with pytest.raises(ValueError, match=message):
            train(small("train.steps=5"), folder, device=cpu, **options)
    with pytest.raises(ValueError, match=r"another config; it differs in optim.lr, train.steps"):
        train(small("train.steps=6", "optim.lr=0.5"), folder, resume=True, device=cpu)
    with pytest.raises(ValueError, match="no run to resume"):
        train(None, tmp_path / "none", resume=True, device=cpu)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("…")
    with pytest.raises(ValueError, match="not a run folder, so it is not overwritten"):
        train(small(), precious, overwrite=True, device=cpu)
    assert (precious / "thesis.tex").exists()
    assert train(small("train.steps=6"), folder, overwrite=True, device=cpu) == (6, "done")


def test_a_damaged_checkpoint_costs_only_time(tmp_path: Path) -> None:
    config, cpu = small("train.steps=35"), torch.device("cpu")
    train(config, tmp_path / "whole", device=cpu)
    folder = tmp_path / "hurt"
    train(config, folder, device=cpu)
    (folder / "model.safetensors").unlink()
    newest = checkpoints(folder / "checkpoints")[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    said: list[str] = []
    assert train(None, folder, resume=True, device=cpu, progress=lambda p: said.append(p.message or "")).done
    assert any("damaged" in text for text in said)
    assert "resuming at step 20" in said
    assert_same_run(tmp_path / "whole", folder)


def start(folder: Path, *extra: str, steps: int = 400, limit_bytes: int | None = None) -> subprocess.Popen[str]:
    """`tra train` as a process of its own."""
    changes = [*SMALL, f"train.steps={steps}", "train.checkpoint_every=7"]
    command = [sys.executable, "-m", "tra", "train", "--preset", "demo", *changes, "--out", str(folder), *extra]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.Popen(
        [*command, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=limit if limit_bytes else None,
    )


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_the_same(tmp_path: Path) -> None:
    """kill -9, again and again, wherever it happens to be: writing a checkpoint, a log line, or computing."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait() == 0
    chance = random.Random(0)
    for kills in range(6):
        process = start(folder, "--resume")
        here = len(checkpoints(folder / "checkpoints")) and checkpoints(folder / "checkpoints")[-1].name
        wait_for(lambda before=here: [p.name for p in checkpoints(folder / "checkpoints")][-1:] not in ([], [before]))
        time.sleep(chance.random() * 0.3)
        assert process.poll() is None, f"it ended before kill {kills}: make it longer"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    process = start(folder, "--resume")
    assert process.wait() == 0
    assert_same_run(whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_checkpoints_then_stops(tmp_path: Path, number: signal.Signals, status: int) -> None:
    folder = tmp_path / "run"
    process = start(folder, steps=100_000)
    wait_for(lambda: (folder / "metrics.jsonl").is_file())
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == status
    state = load_checkpoint(folder / "checkpoints")
    assert state is not None
    assert f"stopped at step {state.step:,} ({number.name})" in out


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_signal_ends_the_step_that_is_being_computed(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a step may take minutes. The state is that of the step before, and a resumed run ends with the same."""
    device, calls, forward = torch.device("cpu"), 0, MLP.forward

    def interrupted(self: MLP, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        out = forward(self, x)
        calls += self.training
        if calls == 4 and where == "forward":
            os.kill(os.getpid(), signal.SIGINT)
        elif calls == 4:
            out.register_hook(lambda _: os.kill(os.getpid(), signal.SIGINT))
        return out

    config = small("train.steps=9")
    train(config, tmp_path / "whole", device=device)
    with monkeypatch.context() as patched:
        patched.setattr(MLP, "forward", interrupted)
        assert train(config, tmp_path / "run", device=device) == (3, "SIGINT")
    assert train(config, tmp_path / "run", resume=True, device=device) == (9, "done")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.timing
def test_a_time_limit_is_kept(tmp_path: Path) -> None:
    begun = time.monotonic()
    process = start(tmp_path / "run", "--time-limit", "8s", steps=100_000)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert time.monotonic() - begun < 8 + 6  # the interpreter and its imports come on top
    assert "time limit" in out
    assert load_checkpoint(tmp_path / "run" / "checkpoints") is not None


@pytest.mark.slow
def test_a_full_disk_ends_the_run_clearly(tmp_path: Path) -> None:
    """The system itself refuses to write more than so many bytes to a file, as a full disk does."""
    folder = tmp_path / "run"
    process = start(folder, "--time-limit", "5s", steps=100_000)
    assert process.wait() == 0
    good = load_checkpoint(folder / "checkpoints")
    assert good is not None
    process = start(folder, "--resume", steps=100_000, limit_bytes=20_000)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(error.strip().splitlines()) <= 2, error
    assert "the disk is full" in error
    assert "--resume" in error
    after = load_checkpoint(folder / "checkpoints")
    assert after is not None
    assert after.step == good.step
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.timing
@pytest.mark.parametrize("name", ["demo", "flipflop", "copy", "induct", "instruct", "latest", "mqar"])
def test_sampling_is_a_small_part_of_a_step(name: str) -> None:
    """Under 5 % of a training step; on a small model and batch, where it weighs the most."""
    config = preset(name).override(["train.batch_size=16", "model.n_layers=1"])
    task, cpu = config.task.build(), torch.device("cpu")
    model = Decoder(config.model)
    step = make_step(model, adamw(model, config.optim, cpu), config, task.size("train"), cpu)
    source = generator(0, "train")
    batch = task.sample("train", 16, source)

    def fastest(action: Callable[[], object], times: int) -> float:
        seconds = []
        for _ in range(times):
            begun = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - begun)
        return min(seconds)

    sampling = fastest(lambda: task.sample("train", 16 * STEPS_PER_DRAW, source), 5) / STEPS_PER_DRAW
    assert sampling < 0.05 * fastest(lambda: step(batch), 5)
