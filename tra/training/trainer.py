"""One run: sample, step, log, checkpoint; stop and go on at any moment.

Data and dropout of a step are functions of the seed and the step's number, so nothing but weights, optimiser state
and the step itself needs to be restored: a resumed run on a CPU ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import errno
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tra.config import RunConfig
from tra.model import Decoder, rename_parameters
from tra.runs.folder import RunFolder, write_rows
from tra.runs.rows import read_rows
from tra.tasks import Batch, Task, stream_seed
from tra.training.checkpoint import State, load_checkpoint, save_checkpoint
from tra.training.distributed import RankLostError, Ranks, joined, local_device
from tra.training.optimizer import adamw, empty_state, load_optimizer_tensors, optimizer_tensors, set_rate
from tra.training.step import COUNTS, make_step

DEAD = 0.99
"""A head that keeps nothing in more than this fraction of its rows is called dead."""

STEPS_PER_DRAW = 32
"""Steps whose batches are sampled at once. Part of what a seed means: another number gives other data."""


class Result(NamedTuple):
    """How a call of `train` ended."""

    step: int
    reason: str  # "done", "time limit", "SIGINT", "SIGTERM"

    @property
    def done(self) -> bool:
        return self.reason == "done"


@dataclass
class Progress:
    """What a progress display may show; `train` calls it after every step, with metrics when they are logged."""

    step: int
    steps: int
    metrics: dict[str, Any] | None = None
    message: str | None = None


class DiskFullError(Exception):
    """The disk took no more. What was saved before is intact."""


def pick_device(device: str | None = None) -> torch.device:
    if device is not None:
        try:
            chosen = torch.device(device)
        except RuntimeError:
            raise ValueError(f"unknown device {device!r}: expected cpu, cuda or cuda:N") from None
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("no CUDA device is available")
        return chosen
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(
    config: RunConfig | None,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    time_limit: float | None = None,
    device: torch.device | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Result:
    """Train a run to its end, or until it is told to stop.

    Args:
        config: The run; None takes the one in the folder, with `resume`.
        folder: Where the run keeps its files. One that exists is never touched without `resume` or `overwrite`.
        resume: Go on from the newest intact checkpoint, or start if there is none.
        time_limit: Seconds after which to checkpoint and stop, with room to do so.
        progress: Called after every step.
    """
    started = time.monotonic()
    device = local_device(pick_device() if device is None else device)
    run = RunFolder(folder)

    def claim() -> tuple[RunConfig, bool]:
        """The config, and whether there is nothing left to do."""
        if config is not None:  # before there is a folder, or before an old one goes
            ranks.check(config.train)
            config.task.build().check_data()
        chosen = run.start(config, resume=resume, overwrite=overwrite)
        ranks.check(chosen.train)
        done = resume and run.weights_file.is_file()
        if not done:
            run.note_environment(device, ranks.world)
        return chosen, done

    with joined(device) as ranks, _clear_when_full(run):
        chosen, done = ranks.done_by_first(claim)
        if done:
            return Result(chosen.train.steps, "done")
        trainer = Trainer(chosen, run, device, progress if ranks.first else lambda _: None, ranks)
        return trainer.run_to(None if time_limit is None else started + time_limit)


class Trainer:
    """The state of a run in training."""

    def __init__(
        self,
        config: RunConfig,
        run: RunFolder,
        device: torch.device,
        progress: Callable[[Progress], None] = lambda _: None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.run, self.device, self.progress = config, run, device, progress
        self.ranks = Ranks() if ranks is None else ranks
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        self.task: Task = config.task.build()
        torch.manual_seed(stream_seed(config.train.seed, "initialisation"))
        self.model = Decoder(config.model).to(device).train()
        self.optimizer = adamw(self.model, config.optim, device)
        self.drawn: tuple[int, Batch] | None = None
        self.window = torch.zeros(COUNTS, dtype=torch.float64, device=device)  # sums since the last log line
        self.step = 0
        self.saved_at = -1
        self.saving_took = 0.0
        self._restore()
        size = self.task.size("train")
        self._step_function = make_step(self.model, self.optimizer, config, size, device, self.ranks)

    def run_to(self, deadline: float | None) -> Result:
        steps = self.config.train.steps
        slowest, begun, logged_at = 0.0, time.monotonic(), self.step
        with _signals() as signals:
            while self.step < steps:
                now = time.monotonic()
                reserve = 2.0 + 2 * slowest + 3 * self.saving_took
                late = deadline is not None and now + reserve > deadline
                try:
                    if self.ranks.agree(signals.received is not None or late):
                        self._save()
                        return Result(self.step, signals.received or "time limit")
                    self.one_step()
                except RankLostError as error:  # before the optimiser: this is the state after the last whole step
                    self._save()
                    raise RankLostError(f"{error}, at step {self.step:,}") from None
                metrics = None
                if self.step % self.config.train.log_every == 0 or self.step == steps:
                    metrics = self._log(time.monotonic() - begun, self.step - logged_at)
                    begun, logged_at = time.monotonic(), self.step
                self.progress(Progress(self.step, steps, metrics))
                slowest = max(slowest, time.monotonic() - now)
                if self.step % self.config.train.checkpoint_every == 0 and self.step < steps:
                    self._save()
        if self.ranks.first:
            self.run.save_weights(self.model, self.step)
        return Result(self.step, "done")

    def one_step(self) -> None:
        self.batch = self.next_batch()
        self.optimise(self.batch)
        self.step += 1

    def optimise(self, batch: Batch) -> None:
        """One step on a batch, at this step's rate and with its dropout."""
        stream = "dropout" if self.ranks.first else f"dropout/{self.ranks.rank}"
        torch.manual_seed(stream_seed(self.config.train.seed, stream, self.step))
        set_rate(self.optimizer, self.config.optim.rate(self.step, self.config.train.steps))
        self.window += self._step_function(batch)

    def next_batch(self) -> Batch:
        """The batch of this step, out of a draw for several: a sampler is many small kernels, whatever their size."""
        rows = self.config.train.batch_size
        draw, place = divmod(self.step, STEPS_PER_DRAW)
        if self.drawn is None or self.drawn[0] != draw:
            seed = self.config.train.seed
            self.drawn = draw, self.task.training_rows(seed, draw, rows * STEPS_PER_DRAW, self.device)
        return Batch(*(self.ranks.rows(x[place * rows : (place + 1) * rows]) for x in self.drawn[1]))

    def _log(self, seconds: float, steps: int) -> dict[str, Any]:
        loss, correct, scored, exact, rows = self.window.tolist()
        self.window.zero_()
        tokens = steps * self.batch.tokens.numel() * self.ranks.world
        window = rows / self.config.train.batch_size
        metrics: dict[str, Any] = {
            "step": self.step,
            "loss": loss / window,
            "accuracy": correct / max(1.0, scored),
            "exact": exact / rows,
            "lr": self.config.optim.rate(self.step - 1, self.config.train.steps),
            "tokens_per_second": round(tokens / seconds),
        }
        statistics = self._statistics()
        if statistics:
            metrics |= statistics
            dead = [
                f"{layer}.{head}"
                for layer, heads in enumerate(statistics["null"])
                for head, null in enumerate(heads)
                if null > DEAD
            ]
            if dead:
                metrics["dead_heads"] = dead
        if self.ranks.first:
            with self.run.metrics_file.open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        return metrics

    def _statistics(self) -> dict[str, list[list[float]]]:
        """TRA's kept fraction, null rows and mean δ, per layer and head, on a few sequences."""
        tokens = self.batch.tokens[: max(1, 2048 // self.batch.tokens.shape[1]), :1024]
        self.model.eval()
        layers = self.model.statistics(tokens)
        self.model.train()
        return {
            key: [[round(x, 5) for x in layer[key].tolist()] for layer in layers]
            for key in (layers[0] if layers else ())
        }

    def _save(self) -> None:
        if self.saved_at == self.step or not self.ranks.first:
            return
        begun = time.monotonic()
        tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.step > 0:
            state = optimizer_tensors(self.model, self.optimizer)
            tensors |= {f"optimizer.{name}": value for name, value in state.items()}
        save_checkpoint(self.run.checkpoint_folder, State(self.step, tensors | {"window": self.window}))
        self.saved_at, self.saving_took = self.step, time.monotonic() - begun

    def _restore(self) -> None:
        """The newest checkpoint, which the first process reads for all."""
        if self.ranks.first:
            self._read_checkpoint()
        self.step = self.saved_at = self.ranks.from_first(self.step if self.saved_at >= 0 else -1)
        if self.step < 0:
            self.step = 0
        if self.ranks.several:
            if self.step > 0 and not self.ranks.first:
                empty_state(self.model, self.optimizer)
            tensors = [*self.model.state_dict().values(), self.window]
            tensors += list(optimizer_tensors(self.model, self.optimizer).values())
            self.ranks.copy_from_first(tensors)

    def _read_checkpoint(self) -> None:
        state = load_checkpoint(self.run.checkpoint_folder, lambda text: self._say(f"warning: {text}"))
        rows = [row for row in read_rows(self.run.metrics_file) if state is not None and row["step"] <= state.step]
        if self.run.metrics_file.is_file():  # what came after the checkpoint will come again
            write_rows(self.run.metrics_file, rows)
        if state is None:
            return

        def part(name: str) -> dict[str, Tensor]:
            tensors = rename_parameters(state.tensors)
            return {key[len(name) :]: value for key, value in tensors.items() if key.startswith(name)}

        self.model.load_state_dict(part("model."))
        if state.step > 0:
            load_optimizer_tensors(self.model, self.optimizer, part("optimizer."))
        self.window.copy_(state.tensors["window"])
        self.step = self.saved_at = state.step
        self._say(f"resuming at step {state.step:,}")

    def _say(self, message: str) -> None:
        self.progress(Progress(self.step, self.config.train.steps, message=message))


class _Signals:
    received: str | None = None


@contextmanager
def _signals() -> Iterator[_Signals]:
    """SIGTERM and Ctrl-C are taken note of, and obeyed between two steps. A second one is not waited for."""
    noted = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _frame: object) -> None:
        noted.received = signal.Signals(number).name
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _clear_when_full(run: RunFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        state = load_checkpoint(run.checkpoint_folder, lambda _: None)
        kept = f"the checkpoint of step {state.step:,} is intact" if state else "there was no checkpoint yet"
        raise DiskFullError(
            f"the disk is full ({error.strerror}), writing to {run.path}; {kept}: make room, then go on with --resume"
        ) from None
