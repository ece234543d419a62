"""Measure what sampling adds to a training step: the whole step, against a step on a batch that was drawn before."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from tra.bench.timing import wait_for
from tra.presets import preset
from tra.runs import RunFolder, environment
from tra.training.trainer import STEPS_PER_DRAW, Trainer

PRESETS = ("flipflop", "copy", "induct", "instruct", "mqar")


def measure_sampling(name: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a step with and without sampling: medians over rounds, which alternate."""
    config = preset(name)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, RunFolder(Path(folder)), device)
        batch = trainer.next_batch()

        def round_of(action: Callable[[], object]) -> float:
            wait_for(device)
            begun = time.perf_counter()
            for _ in range(STEPS_PER_DRAW):
                action()
            wait_for(device)
            return 1e3 * (time.perf_counter() - begun) / STEPS_PER_DRAW

        def ready_step() -> None:
            trainer.step += 1  # the same bookkeeping as in a real step, on a batch drawn before
            trainer.optimise(batch)

        round_of(trainer.one_step)
        both, alone = [], []
        for _ in range(rounds):
            both.append(round_of(trainer.one_step))
            alone.append(round_of(ready_step))
    with_sampling, without = statistics.median(both), statistics.median(alone)
    return {
        "preset": name,
        "mechanism": config.model.mechanism,
        "step_ms": round(without, 3),
        "step_with_sampling_ms": round(with_sampling, 3),
        "sampling_share": round(max(0.0, with_sampling / without - 1), 4),
    }


def bench_sampling(device: torch.device, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Return a row per published task, at the paper's size."""
    rows = []
    for name in PRESETS:
        progress(name)
        rows.append(measure_sampling(name, device, rounds=8 if device.type == "cuda" else 1))
    return {"environment": environment(device), "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    options = command.parser("sampling", __doc__).parse_args(arguments)
    command.show(bench_sampling(command.pick_device(options.device), command.progress), options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
