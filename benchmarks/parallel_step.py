"""Measure what FSDP2 costs a training step in one process, and check that two processes on one device have its losses.

NCCL refuses two processes on one GPU, so the two exchange gradients and weights with gloo, through the CPU. This checks
the losses; it says nothing about the speed of several GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import command
from tra.bench.step import Shape, run_config
from tra.bench.timing import wait_for
from tra.config import RunConfig
from tra.model import Decoder
from tra.runs import environment
from tra.tasks import Batch
from tra.training.ddp_and_fsdp import compile_layers, is_compiled, release, shard, share
from tra.training.distributed import Ranks
from tra.training.loss import TrainingLoss
from tra.training.optimizer import adamw
from tra.training.step import StepFunction, make_step

STEPS = 10
"""Steps whose losses are compared, and steps of a timed round."""
ALLOWED_RATIO = 1.05
"""Largest ratio that FSDP2 in one process should cost, against the same compiled layers without it."""

ONE_PROCESS = ("whole", "pieces", "layers", "fsdp")
"""A step as `tra train` runs it; the same in two pieces; with each layer compiled alone; the last one under FSDP2."""


def build_step(kind: str, config: RunConfig, device: torch.device, ranks: Ranks) -> tuple[nn.Module, StepFunction]:
    """Return a loss and its step, for one process (a kind of `ONE_PROCESS`) or several ("ddp" or "fsdp")."""
    torch.manual_seed(0)
    model = Decoder(config.model).train()
    loss: Any = TrainingLoss(model)
    if ranks.has_others:
        loss = share(loss, dataclasses.replace(config.train, parallel=kind), device, ranks)  # type: ignore[arg-type]
    elif kind in ("whole", "pieces"):
        loss = loss.to(device)
    else:
        if is_compiled(config.train, device):
            compile_layers(loss)
        loss = shard(loss, device, 1) if kind == "fsdp" else loss.to(device)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, compile="off"))
    if kind == "pieces":
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=2))
    optimizer = adamw(model, config.optim, device)
    return loss, make_step(model, optimizer, config, config.task.build().size("train"), device, ranks, loss)


def batches(config: RunConfig, device: torch.device, ranks: Ranks) -> list[Batch]:
    """Return this process's batches of the first steps."""
    rows = config.train.batch_size
    drawn = config.task.build().training_rows(0, 0, rows * STEPS, device)
    own = rows // ranks.world
    starts = [step * rows + ranks.rank * own for step in range(STEPS)]
    return [Batch(*(part[start : start + own] for part in drawn)) for start in starts]


def measure(kind: str, config: RunConfig, device: torch.device, ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Return the losses of the first steps, and milliseconds of a step: the median over rounds."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    drawn = batches(config, device, ranks)
    loss, step = build_step(kind, config, device, ranks)
    losses = [float(step(batch)[0]) for batch in drawn]
    times = []
    for _ in range(rounds):
        wait_for(device)
        begun = time.perf_counter()
        for batch in drawn:
            step(batch)
        wait_for(device)
        times.append(1e3 * (time.perf_counter() - begun) / STEPS)
    release(loss)
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return {
        "processes": ranks.world,
        "kind": kind,
        "step_ms": round(statistics.median(times), 3),
        "peak_mib": None if peak is None else round(peak),
        "losses": losses,
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest relative difference of two rows' losses."""
    return max(abs(a - b) / abs(a) for a, b in zip(one["losses"], other["losses"], strict=True))


def bench_parallel_step(
    shape: Shape, device: torch.device, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Return the rows of one process and of two, whether their losses agree, and the ratio that FSDP2 costs.

    Losses agree if they differ by at most twice as much as they do in one process with two pieces or other kernels, or
    by a rounding of the precision.
    """
    config, rounds = run_config("tra", shape), 10 if device.type == "cuda" else 1
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    try:
        for kind in ONE_PROCESS:
            progress(f"one process, {kind}")
            rows.append(measure(kind, config, device, Ranks(), rounds))
    finally:
        dist.destroy_process_group()
    progress("two processes")
    rows += two_processes(shape, device)
    of_kind = {row["kind"]: row for row in rows if row["processes"] == 1}
    whole = of_kind["whole"]
    rounding = torch.finfo(torch.bfloat16 if device.type == "cuda" else torch.float32).eps
    allowed = max(rounding, *(2 * difference(whole, of_kind[kind]) for kind in ("pieces", "layers")))
    for row in rows:
        if "error" not in row:
            row["difference"] = difference(whole, row)
    ratio = of_kind["fsdp"]["step_ms"] / of_kind["layers"]["step_ms"]
    return {
        "environment": environment(device),
        "shape": shape._asdict(),
        "fsdp_ratio": round(ratio, 3),
        "fsdp_ratio_to_captured": round(of_kind["fsdp"]["step_ms"] / whole["step_ms"], 3),
        "fsdp_ratio_is_reached": ratio <= ALLOWED_RATIO,
        "allowed_difference": allowed,
        "losses_agree": all(row["difference"] <= allowed for row in rows if "error" not in row),
        "errors": [f"{row['processes']} processes, {row['kind']}: {row['error']}" for row in rows if "error" in row],
        "rows": rows,
    }


def two_processes(shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    """Start two processes on one device; return a row for each engine, with the error of an engine that failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        worker = ["-m", "benchmarks.parallel_step", "--device", device.type, "--worker", json.dumps(shape), str(out)]
        done = subprocess.run([*launcher, *worker], capture_output=True, text=True, check=False, env=os.environ)
        if not out.is_file():
            last = (done.stderr.strip().splitlines() or ["ended without a message"])[-1]
            return [{"processes": 2, "kind": "both", "error": last}]
        rows: list[dict[str, Any]] = json.loads(out.read_text())
        return rows


def run_worker(shape: Shape, device: torch.device, out: Path) -> None:
    """Measure both engines in one of the two processes. The first process writes the rows."""
    device = torch.device("cuda", 0) if device.type == "cuda" else device
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    rows: list[dict[str, Any]] = []
    for kind in ("ddp", "fsdp"):
        try:
            rows.append(measure(kind, run_config("tra", shape), device, ranks, 1))
        except (RuntimeError, NotImplementedError) as error:  # gloo has not all exchanges for tensors of a GPU
            rows.append({"processes": 2, "kind": kind, "error": str(error).splitlines()[0]})
    if ranks.is_first:
        out.write_text(json.dumps(rows))
    dist.destroy_process_group()


def default_shape(device: torch.device) -> Shape:
    return Shape("medium", 64, 256) if device.type == "cuda" else Shape("tiny", 4, 16)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("parallel_step", __doc__)
    parser.add_argument("--size", choices=("tiny", "mini", "medium"), help="the model; medium on a GPU, tiny on a CPU")
    parser.add_argument("--worker", nargs=2, metavar=("SHAPE", "FILE"), help="what the script starts itself with")
    options = parser.parse_args(arguments)
    device = command.pick_device(options.device)
    if options.worker:
        run_worker(Shape(*json.loads(options.worker[0])), device, Path(options.worker[1]))
        return 0
    shape = default_shape(device)
    shape = shape if options.size is None else shape._replace(size=options.size)
    result = bench_parallel_step(shape, device, command.progress)
    command.show(result, options.json)
    return 0 if result["losses_agree"] else 1


if __name__ == "__main__":
    command.run(main)
