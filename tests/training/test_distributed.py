"""One run over two processes: the same loss, one folder, and what happens when one of them is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tra.presets import preset
from tra.runs import RunFolder, read_rows
from tra.training import train
from tra.training.checkpoint import checkpoints
from tra.training.distributed import RankLostError, Ranks, meet

CHANGES = (
    "model.d_model=32",
    "model.n_layers=1",
    "train.batch_size=8",
    "train.log_every=1",
    "train.checkpoint_every=1000",
    "optim.clip=1.0",
)


def command(
    folder: Path, *extra: str, name: str = "demo", changes: tuple[str, ...] = CHANGES, launch: tuple[str, ...] = ()
) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    return [
        *launcher,
        *launch,
        "-m",
        "tra",
        "train",
        "--preset",
        name,
        *changes,
        "--out",
        str(folder),
        "--device",
        "cpu",
        *extra,
    ]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


@contextmanager
def start(
    folder: Path, *extra: str, changes: tuple[str, ...] = CHANGES, launch: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start a run over two processes. A test that fails leaves none behind, and waits for none."""
    with subprocess.Popen(
        command(folder, *extra, changes=changes, launch=launch),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            yield process
        except BaseException:
            for pid in (process.pid, *children(process)):  # torchrun gives each process a session of its own
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), ("train.accumulate=2",)], ids=["whole", "in pieces"])
def test_the_loss_is_that_of_one_process(tmp_path: Path, changes: tuple[str, ...]) -> None:
    """Twenty steps, after which a wrong gradient would show; only the order of summation differs."""
    changes = (*CHANGES, *changes, "train.steps=20", "optim.lr=0.003")
    done = subprocess.run(
        command(tmp_path / "two", changes=changes), capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done after 20 steps") == 1
    train(preset("demo").override(changes), tmp_path / "one", device=torch.device("cpu"))
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(two) == 20
    assert two == pytest.approx(one, rel=1e-4)
    assert one[0] != pytest.approx(one[-1], rel=1e-2)
    rows = [read_rows(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    assert [row["accuracy"] for row in rows[0]] == pytest.approx([row["accuracy"] for row in rows[1]], abs=0.02)


def meet_in_threads(
    store: dist.Store, ranks: list[int], world: int, seconds: int = 60
) -> dict[int, dist.Store | Exception]:
    """Let ranks meet that start in this order, a little apart, and return what each got."""
    found: dict[int, dist.Store | Exception] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = meet(store, rank, world, timedelta(seconds=seconds))
        except RankLostError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_a_restart_reads_nothing_of_the_start_before(order: list[int]) -> None:
    """Whoever comes first, also after a start that not all reached."""
    store = dist.HashStore()
    before = meet_in_threads(store, order, 3)
    assert isinstance(before[0], dist.Store)
    before[0].set("address", "that of a process which has ended")
    lost = meet_in_threads(store, [0, 1], 3, seconds=1)
    assert str(lost[0]) == str(lost[1]) == "not all processes of the run have started within 1 s"
    after = meet_in_threads(store, order, 3)
    for rank in order:
        mine = after[rank]
        assert isinstance(mine, dist.Store)
        assert not mine.check(["address"])
        mine.set(f"from {rank}", "here")
    for rank in order:
        mine = after[rank]
        assert isinstance(mine, dist.Store)
        assert all(mine.check([f"from {other}"]) for other in order)


def children(process: subprocess.Popen[str]) -> list[int]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found]


def ranks(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids by rank."""
    found = {}
    for pid in children(process):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for variable in variables:
            if variable.startswith(b"RANK="):
                found[int(variable[5:])] = pid
    return found


def wait_for_steps(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while len(losses(folder)) < steps:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "rank"), [("ddp", 0), ("ddp", 1), ("fsdp", 1)])
def test_a_killed_rank_ends_the_job_and_the_run_goes_on(tmp_path: Path, engine: str, rank: int) -> None:
    changes = (*CHANGES, "train.steps=100000", "train.checkpoint_every=20", f"train.parallel={engine}")
    folder = tmp_path / "run"
    with start(folder, changes=changes) as process:
        wait_for_steps(process, folder, 50)
        os.kill(ranks(process)[rank], signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    reached = len(losses(folder))
    if rank == 1:  # the first process is left, says so, and saves the last whole step if it has all weights
        found = re.search(r"tra: another process of the run has ended, at step ([\d,]+); go on with --resume", said)
        assert found, said
        # with FSDP2 a log line needs the other process too
        assert int(found[1].replace(",", "")) - reached in ((0, 1) if engine == "fsdp" else (0,))
    else:
        assert "tra: another process of the run has ended" in said
    with start(folder, "--resume", changes=changes) as process:
        wait_for_steps(process, folder, reached + 5)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    found = re.search(r"resuming at step (\d+)", said)
    assert found
    if rank == 1 and engine == "ddp":
        assert int(found[1]) == reached
    else:  # nobody was left to save: the last checkpoint, or the one before if it was being written
        assert int(found[1]) % 20 == 0
        assert 0 <= reached - int(found[1]) <= 20
    steps = [row["step"] for row in read_rows(folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert checkpoints(folder / "checkpoints")[-1].name.startswith(f"step-{len(steps):08d}")  # SIGTERM saves


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_from_the_checkpoint(tmp_path: Path) -> None:
    """The command of docs/many-gpus.md: one command, which ends well although a process of it was killed."""
    changes = (*CHANGES, "train.steps=150", "train.checkpoint_every=20", "train.parallel=fsdp")
    folder = tmp_path / "run"
    with start(folder, "--resume", changes=changes, launch=("--max-restarts", "3")) as process:
        wait_for_steps(process, folder, 45)
        os.kill(ranks(process)[1], signal.SIGKILL)
        out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert out.count("done after 150 steps") == 1
    found = re.search(r"resuming at step (\d+)", said)
    assert found
    assert int(found[1]) >= 40
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == list(range(1, 151))
    assert RunFolder(folder).load_model().config == preset("demo").override(changes).model


@pytest.mark.slow
def test_a_resumed_run_has_the_loss_of_an_undisturbed_one(tmp_path: Path) -> None:
    changes = (*CHANGES, "train.steps=30", "optim.lr=0.003", "train.checkpoint_every=10")
    for name in ("whole", "cut"):
        extra = ("--time-limit", "1s") if name == "cut" else ()
        subprocess.run(
            command(tmp_path / name, *extra, changes=changes), env=environment(), capture_output=True, check=True
        )
    assert len(losses(tmp_path / "cut")) < 30
    resumed = command(tmp_path / "cut", "--resume", changes=changes)
    done = subprocess.run(resumed, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_bad_input_is_said_once(tmp_path: Path) -> None:
    changes = (*CHANGES, "train.batch_size=9")
    done = subprocess.run(
        command(tmp_path / "run", changes=changes), capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode != 0
    assert done.stderr.count("tra: a batch of 9 can't be dealt to 2 processes in 1 pieces each") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_that_cannot_be_connected_say_why(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path / "run"),
        capture_output=True,
        text=True,
        env=environment() | {"GLOO_SOCKET_IFNAME": "none0"},
        check=False,
    )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("tra: ")]
    assert said
    for line in said:
        assert re.fullmatch(
            r"tra: the processes of the run can't be connected: .*Unable to find address for: none0", line
        )
    assert not (tmp_path / "run").exists()


def test_what_does_not_go_with_several_processes_is_refused() -> None:
    several, config = Ranks(0, 2), preset("demo")
    Ranks().check(config.override(["train.parallel=none"]).train)
    several.check(config.train)
    with pytest.raises(ValueError, match=r"train\.parallel=none trains in one process, but torchrun started 2: set"):
        several.check(config.override(["train.parallel=none"]).train)
    with pytest.raises(ValueError, match="a batch of 9 can't be dealt to 2 processes in 1 pieces each"):
        several.check(config.override(["train.batch_size=9"]).train)
