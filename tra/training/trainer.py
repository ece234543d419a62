"""A run in training: sample, step, log, checkpoint. It can stop and go on at any step.

Data and dropout of a step follow from the seed and the number of the step, so a checkpoint holds only weights,
optimizer state and that number. On a CPU a resumed run ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tra.config import RunConfig
from tra.model import Decoder
from tra.runs import RunFolder, open_to_append, read_rows, write_rows
from tra.tasks import Batch, Task, stream_seed
from tra.training.checkpoint import (
    State,
    checkpoint_part,
    describe_checkpoint,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from tra.training.ddp_and_fsdp import (
    is_sharded,
    local_part,
    share,
    share_rows,
    training_statistics,
    whole_tensors,
)
from tra.training.distributed import RankLostError, Ranks
from tra.training.interruptions import (
    NonFiniteError,
    StepAbandonedError,
    StopRequest,
    answer_signals_in_backward,
    catch_stop_signals,
)
from tra.training.loss import COUNTS, TrainingLoss
from tra.training.optimizer import (
    adamw,
    allocate_state,
    check_optimizer_tensors,
    load_optimizer_tensors,
    optimizer_tensors,
    set_rate,
)
from tra.training.sharded_checkpoint import load_into_shards, save_sharded_checkpoint
from tra.training.step import make_step

DEAD_NULL_RATE = 0.99
"""Fraction of queries without any kept key above which a head is reported as dead."""

STEPS_PER_DRAW = 32
"""Steps whose batches are sampled at once. Part of what a seed means: another number gives other data."""

STATISTICS_TOKENS, STATISTICS_LENGTH = 2048, 1024
"""Tokens in all, and of one sequence, from which the statistics of a log line are taken."""


class Result(NamedTuple):
    """How a call of `train` ended."""

    step: int
    reason: str  # "done", "time limit", "SIGINT", "SIGTERM"

    @property
    def done(self) -> bool:
        return self.reason == "done"


@dataclass
class Progress:
    """The report of `train` after a step, with metrics if the step is logged."""

    step: int
    steps: int
    metrics: dict[str, Any] | None = None
    message: str | None = None


class Trainer:
    """A run in training: its model, optimizer and step number."""

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
        self.model = Decoder(config.model).train()
        size = self.task.size("train")
        row_parts = share_rows(config.train, size, self.ranks)
        self.row_groups = self.ranks.world // self.ranks.sharing(config.train)
        """Groups of processes, each with rows of its own."""
        loss = TrainingLoss(self.model, config.train.checkpoint_activations, row_parts)
        self.loss = share(loss, config.train, device, self.ranks)
        self.is_sharded = is_sharded(self.loss)
        self.optimizer = adamw(self.model, config.optim, device)
        self.drawn: tuple[int, Batch] | None = None  # the number of the last draw, and its rows
        self.window = torch.zeros(COUNTS, dtype=torch.float64, device=device)  # sums since the last log line
        self.step = 0
        self.saved_at = -1  # step of the newest checkpoint
        self.saving_seconds = 0.0
        self.nonfinite_logs = 0  # log lines in a row whose loss is not finite
        self._restore()
        self._step_function = make_step(
            self.model, self.optimizer, config, size, device, self.ranks, self.loss, row_parts
        )

    def run_until(self, deadline: float | None) -> Result:
        """Train to the last step; checkpoint and stop in time for the deadline, or on a signal."""
        train = self.config.train
        slowest, logged_at, logged_step = 0.0, time.monotonic(), self.step
        # On a CPU a step may take minutes. Several processes stop together, between steps, and a GPU is fast.
        can_abandon = self.device.type == "cpu" and not self.ranks.has_others
        with catch_stop_signals() as request, contextlib.ExitStack() as hooks:
            if can_abandon:
                hooks.callback(self._before_update(lambda: setattr(request, "may_abandon", False)))
            while self.step < train.steps:
                now = time.monotonic()
                reserve = 2.0 + 2 * slowest + 3 * self.saving_seconds
                is_late = deadline is not None and now + reserve > deadline
                try:
                    if self.ranks.any_true(request.signal is not None or is_late):
                        self._save()
                        return Result(self.step, request.signal or "time limit")
                    request.may_abandon = can_abandon and request.signal is None
                    self._finite_step(request)
                    metrics = None
                    if self.step % train.log_every == 0 or self.step == train.steps:
                        metrics = self._log(time.monotonic() - logged_at, self.step - logged_step)
                        logged_at, logged_step = time.monotonic(), self.step
                    self.progress(Progress(self.step, train.steps, metrics))
                    slowest = max(slowest, time.monotonic() - now)
                    if self.step % train.checkpoint_every == 0 and self.step < train.steps:
                        self._save()
                except StepAbandonedError:  # the state is that after the previous step
                    self._save()
                    return Result(self.step, request.signal or "SIGINT")
                except RankLostError as error:  # never raised within an optimizer's step, so the last step is complete
                    if not self.is_sharded:  # the other parts of sharded weights are lost
                        self._save()
                    raise RankLostError(f"{error}, at step {self.step:,}") from None
        if not self._is_finite():
            self._end_nonfinite("the weights are not finite")
        weights = whole_tensors(self.model.state_dict(), self.ranks)
        if self.ranks.is_first:
            self.run.save_weights(weights, self.step)
        return Result(self.step, "done")

    def _before_update(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call` in every step before weights change, and handle signals until then. Return what undoes this."""
        parts = [part for layer in self.model.layers for part in layer.named_modules()]
        if self.config.train.compile == "on":  # a compiled step runs as one piece
            parts = []
        # Projections that a layer fuses take no hooks.
        handles = [
            m.register_forward_hook(answer_signals_in_backward)
            for name, m in parts
            if not name.startswith("self_attn.")
        ]
        update = self.optimizer.register_step_pre_hook(lambda *_: call())

        def remove() -> None:
            for handle in (*handles, update):
                handle.remove()

        return remove

    def _finite_step(self, request: StopRequest) -> None:
        """Train on the next batch. End the run if gates have overflowed, which is an error of attention on a CPU."""
        try:
            self.one_step()
        except ValueError as error:
            request.may_abandon = False
            if "must be finite" not in str(error):
                raise
            self._end_nonfinite(str(error))

    def one_step(self) -> None:
        """Train on the next batch."""
        self.batch = self.next_batch()
        self.optimise(self.batch)
        self.step += 1

    def optimise(self, batch: Batch) -> None:
        """Do one step on a batch, with this step's rate and dropout."""
        stream = "dropout" if self.ranks.is_first else f"dropout/{self.ranks.rank}"
        torch.manual_seed(stream_seed(self.config.train.seed, stream, self.step))
        set_rate(self.optimizer, self.config.optim.rate(self.step, self.config.train.steps))
        self.window += self._step_function(batch)

    def next_batch(self) -> Batch:
        """Return this process's rows of the step's batch, whole also where processes share them.

        Batches of several steps are drawn at once: a sampler is many small kernels, whatever its size.
        """
        rows = self.config.train.batch_size
        draw, index = divmod(self.step, STEPS_PER_DRAW)
        if self.drawn is None or self.drawn[0] != draw:
            seed = self.config.train.seed
            self.drawn = draw, self.task.training_rows(seed, draw, rows * STEPS_PER_DRAW, self.device)
        own = rows // self.row_groups
        first = index * rows + self.ranks.rank * self.row_groups // self.ranks.world * own
        tokens, targets, loss_mask = self.drawn[1]
        end = first + own
        return Batch(tokens[first:end], targets[first:end], loss_mask[first:end])

    def _log(self, seconds: float, steps: int) -> dict[str, Any]:
        """Write a line of metrics over the last steps, and return it."""
        loss, correct, scored, exact, rows = self.window.tolist()
        self.window.zero_()
        tokens = steps * self.batch.tokens.numel() * self.row_groups
        metrics: dict[str, Any] = {
            "step": self.step,
            "loss": loss / (rows / self.config.train.batch_size),
            "accuracy": correct / max(1.0, scored),
            "exact": exact / rows,
            "lr": self.config.optim.rate(self.step - 1, self.config.train.steps),
            "tokens_per_second": round(tokens / seconds),
        }
        metrics |= self._statistics()
        dead_heads = [
            f"{layer}.{head}"
            for layer, heads in enumerate(metrics.get("null", ()))
            for head, null_rate in enumerate(heads)
            if null_rate > DEAD_NULL_RATE
        ]
        if dead_heads:
            metrics["dead_heads"] = dead_heads
        if self.ranks.is_first:
            with open_to_append(self.run.metrics_file) as file:
                file.write(f"{json.dumps(metrics)}\n".encode())
        self.nonfinite_logs = 0 if math.isfinite(loss) else self.nonfinite_logs + 1
        if self.nonfinite_logs >= self.config.train.max_nonfinite_steps:
            self._end_nonfinite("the loss is not finite")
        return metrics

    def _statistics(self) -> dict[str, list[list[float]]]:
        """Return `Decoder.statistics` by name, layer and head, on a few sequences of the batch."""
        rows = max(1, STATISTICS_TOKENS // self.batch.tokens.shape[1])
        self.model.eval()
        layers = training_statistics(self.loss, self.batch.tokens[:rows, :STATISTICS_LENGTH])
        self.model.train()
        return {
            key: [[round(x, 5) for x in layer[key].tolist()] for layer in layers]
            for key in (layers[0] if layers else ())
        }

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one, or its weights are not finite."""
        writes = self.ranks.is_first or self.is_sharded
        if self.saved_at == self.step or not writes or not self._is_finite():
            return
        begun = time.monotonic()
        if self.is_sharded:
            save_sharded_checkpoint(self.run.checkpoint_folder, self.step, self._tensors(), self.ranks)
        else:
            save_checkpoint(self.run.checkpoint_folder, State(self.step, self._tensors()))
        self.saved_at, self.saving_seconds = self.step, time.monotonic() - begun

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by name."""
        tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.step > 0:
            state = optimizer_tensors(self.model, self.optimizer)
            tensors |= {f"optimizer.{name}": value for name, value in state.items()}
        return tensors | {"window": self.window}

    def _is_finite(self) -> bool:
        """Return whether all weights are finite. All processes call it where weights are sharded."""
        values = [local_part(value) for value in self.model.state_dict().values()]
        finite = bool(torch.stack([value.isfinite().all() for value in values]).all())
        return not self.ranks.any_true(not finite) if self.is_sharded else finite

    def _end_nonfinite(self, what: str) -> NoReturn:
        """End the run in all processes, of which the first says why."""
        if not self.ranks.is_first:
            raise SystemExit(1)
        kept = f"the checkpoint of step {self.saved_at:,} is kept" if self.saved_at >= 0 else "there is no checkpoint"
        raise NonFiniteError(f"{self.run.path}: {what} at step {self.step:,}, so the run has ended; {kept}")

    def _restore(self) -> None:
        """Restore the newest checkpoint. The first process chooses it and, unless it is sharded, reads it for all."""
        path, self.saved_at = self.ranks.run_on_first(self._read_checkpoint)
        self.step = max(0, self.saved_at)
        if self.ranks.has_others and self.step > 0 and (self.is_sharded or not self.ranks.is_first):
            allocate_state(self.model, self.optimizer)
        if self.is_sharded and path is not None:
            load_into_shards(path, self._tensors(), self.ranks)
        elif self.ranks.has_others and not self.is_sharded:
            self.ranks.copy_from_first(list(self._tensors().values()))

    def _read_checkpoint(self) -> tuple[Path | None, int]:
        """Restore the newest checkpoint, except sharded weights. Return its path and step, -1 if there is none."""

        def warn(text: str) -> None:
            self._report(f"warning: {text}")

        read = describe_checkpoint if self.is_sharded else read_checkpoint
        state = load_checkpoint(self.run.checkpoint_folder, warn, self.model.state_dict(), read)
        if state is not None:
            self._check(state)
            if not self.is_sharded:
                self._take(state)
        if self.run.metrics_file.is_file():  # steps after the checkpoint will be logged again
            rows = read_rows(self.run.metrics_file, ("step",))
            write_rows(self.run.metrics_file, [row for row in rows if state is not None and row["step"] <= state.step])
        if state is None:
            return None, -1
        self.step = state.step
        self._report(f"resuming at step {state.step:,}")
        return state.path, state.step

    def _check(self, state: State) -> None:
        """Raise a ValueError if a checkpoint, whose model fits, can't be used."""
        window = state.tensors.get("window")
        try:
            if not 0 <= state.step <= self.config.train.steps:
                raise ValueError(f"the run has {self.config.train.steps:,} steps")
            if state.step > 0:
                check_optimizer_tensors(self.model, checkpoint_part(state, "optimizer."))
            if window is None or window.shape != self.window.shape:
                raise ValueError("it has no sums since the last log line")
        except ValueError as error:
            step = str(state.step)[:20]
            raise ValueError(
                f"the checkpoint of step {step} in {self.run.checkpoint_folder} can't be used: {error}"
            ) from None

    def _take(self, state: State) -> None:
        """Restore a checkpoint that fits."""
        self.model.load_state_dict(checkpoint_part(state, "model."))
        if state.step > 0:
            load_optimizer_tensors(self.model, self.optimizer, checkpoint_part(state, "optimizer."))
        self.window.copy_(state.tensors["window"])

    def _report(self, message: str) -> None:
        self.progress(Progress(self.step, self.config.train.steps, message=message))
