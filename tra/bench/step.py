"""Whole training steps of every mechanism against RoPE's: milliseconds and peak memory.

A process per mechanism compiles and captures its step; when all are ready each is timed in turn, while the others wait.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tra.attention import MECHANISMS
from tra.bench.timing import wait_for
from tra.config import EvalConfig, OptimConfig, RunConfig, TaskConfig, TrainConfig
from tra.model import DecoderConfig
from tra.runs import RunFolder, environment, import_file
from tra.runs.extensions import imported_paths
from tra.runs.processes import python_command
from tra.training import Trainer

VOCABULARY = 256
"""Small, so that the output layer doesn't hide what the mechanisms cost; or GPT-2's, as in a language model."""


class Shape(NamedTuple):
    """The model and batch of a step."""

    size: str
    batch: int
    length: int
    vocabulary: int = VOCABULARY
    paper: bool = False
    """The authors' block and dropout, as in the paper's cost table; otherwise pre-norm without dropout."""
    margin: float = 0.0
    """Margin, for a mechanism that has one."""


GPT2_VOCABULARY = 50_304
"""GPT-2's 50,257, rounded up to a multiple of 64."""

SHAPES = (Shape("mini", 64, 512), Shape("medium", 64, 256), Shape("medium", 64, 256, GPT2_VOCABULARY))

COST_SHAPES = tuple(Shape(size, 64, 256, GPT2_VOCABULARY, paper=True) for size in ("tiny", "medium"))
"""The paper's cost table."""


def run_config(mechanism: str, shape: Shape) -> RunConfig:
    """Return a run of that shape on a task of that length, in bfloat16."""
    recipe = {"block": "authors", "dropout": 0.01} if shape.paper else {}
    model = getattr(DecoderConfig, shape.size)(shape.vocabulary, mechanism=mechanism, margin=shape.margin, **recipe)
    return RunConfig(
        TaskConfig("flipflop", {"length": shape.length}),
        model,
        OptimConfig(lr=1e-4),
        TrainConfig(steps=1000, batch_size=shape.batch),
        EvalConfig(),
    )


def measure_step(mechanism: str, shape: Shape, device: torch.device, ready: Callable[[], None]) -> dict[str, Any]:
    """Measure the median over rounds of ten steps. `ready` is called, and may block, after warming up."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        trainer = Trainer(run_config(mechanism, shape), RunFolder(Path(folder)), device)
        batch = trainer.next_batch()
        trainer.optimise(batch)
        wait_for(device)
        until_ready = time.perf_counter() - begun
        on_gpu = device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) / 2**20 if on_gpu else None
        ready()
        rounds = []
        for _ in range(12 if on_gpu else 1):
            wait_for(device)
            begun = time.perf_counter()
            for _ in range(10 if on_gpu else 1):
                trainer.optimise(batch)
            wait_for(device)
            rounds.append(1e3 * (time.perf_counter() - begun) / (10 if on_gpu else 1))
    return {
        "mechanism": mechanism,
        **shape._asdict(),
        "step_ms": round(statistics.median(rounds), 3),
        "fastest_ms": round(min(rounds), 3),
        "slowest_ms": round(max(rounds), 3),
        "peak_mib": None if peak is None else round(peak),
        "loss_is_finite": bool(torch.isfinite(trainer.window[0])),
        "ready_after_s": round(until_ready, 1),
    }


def bench_step(
    device: str,
    mechanisms: Sequence[str] = tuple(MECHANISMS),
    shapes: Sequence[Shape] = SHAPES,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return a row per mechanism and shape, with ratios to RoPE's; where one fails, its error in place of numbers."""
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        progress(f"{shape.size}: warming up")
        processes = [MeasuringProcess(mechanism, shape, device) for mechanism in mechanisms]
        try:
            ready = [process for process in processes if process.wait_until_ready()]
            for process in ready:
                progress(f"{shape.size}: {process.mechanism}")
                process.measure()
        finally:
            for process in processes:
                process.stop()
        rows += [process.result for process in processes]
    for row in rows:
        same = row["size"], row["vocabulary"]
        rope = next((r for r in rows if r["mechanism"] == "rope" and (r["size"], r["vocabulary"]) == same), {})
        for name in ("step_ms", "peak_mib"):
            if row.get(name) and rope.get(name):
                row[name.split("_")[0] + "_ratio"] = round(row[name] / rope[name], 3)
    return {"environment": environment(torch.device(device)), "rows": rows}


class MeasuringProcess:
    """A measurement in a process of its own, which prints `ready` once compiled and measures when it gets a line."""

    def __init__(self, mechanism: str, shape: Shape, device: str) -> None:
        self.mechanism = mechanism
        self.result: dict[str, Any] = {"mechanism": mechanism, **shape._asdict()}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 read after the process has ended
        file = mechanism.rpartition(":")[0]  # the user's file, if any
        command = python_command("-m", "tra.bench.step", mechanism, json.dumps(shape), device, *imported_paths([file]))
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def wait_until_ready(self) -> bool:
        assert self.process.stdout is not None
        if any(line.strip() == "ready" for line in iter(self.process.stdout.readline, "")):
            return True
        self._failed()
        return False

    def measure(self) -> None:
        output, _ = self.process.communicate("go\n")
        if self.process.returncode == 0:
            self.result = json.loads(output.splitlines()[-1])
        else:
            self._failed()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _failed(self) -> None:
        self.process.wait()
        self.errors.seek(0)
        self.result["error"] = (self.errors.read().strip().splitlines() or ["ended without a message"])[-1]


def _wait_for_the_start() -> None:
    print("ready", flush=True)
    if not sys.stdin.readline():  # the process that started this one has ended
        raise SystemExit(1)


if __name__ == "__main__":
    for path in sys.argv[4:]:
        import_file(path)
    found = measure_step(sys.argv[1], Shape(*json.loads(sys.argv[2])), torch.device(sys.argv[3]), _wait_for_the_start)
    print(json.dumps(found))
