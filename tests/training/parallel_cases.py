"""Short runs that are trained by one process and by several: `torchrun -m tests.training.parallel_cases FOLDER`.

Starting processes takes seconds, so one launch trains all of them. Results are safetensors files in the folder.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tra.config import RunConfig
from tra.presets import preset
from tra.runs import RunFolder
from tra.training import Trainer
from tra.training import loss as loss_module
from tra.training.ddp_and_fsdp import release, whole_tensors
from tra.training.distributed import Ranks, join_processes

CPU = torch.device("cpu")
COMMON = (
    "model.d_model=32",
    "model.n_layers=2",
    "train.log_every=1",
    "optim.lr=0.003",
    "optim.warmup=0",
    "optim.clip=null",
)
COPY = ("task.name=copy", 'task.arguments={"alphabet":12,"longest":5}', "evaluate.splits=[]", "evaluate.examples_of={}")
TEXT = ("task.name=text", "evaluate.splits=[]", "evaluate.examples_of={}")
CLIPPED = "optim.clip=0.05"
PIECES = "train.accumulate=2"


class Case(NamedTuple):
    """A short run."""

    changes: tuple[str, ...]
    batch_size: int = 8
    large_vocabulary: bool = False
    """Take the loss by the fused last layer."""
    triton: bool = False
    """Attend by the kernels, with projections in one operator."""
    counted: bool = False
    """Count what the processes exchange in a step."""


class Exchanges(TorchDispatchMode):
    """Counts operations of torch.distributed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


SAME_BITS = {
    "padded rows": Case(COPY, counted=True),
    "text": Case(TEXT),
    "text, large vocabulary": Case(TEXT, large_vocabulary=True),
    "checkpointed": Case((*COPY, "train.checkpoint_activations=true")),
    "fused projections": Case((*COPY, "model.n_layers=1"), batch_size=4, triton=True),
}
"""Over two processes, a gradient is the sum of two: as in one process that takes two pieces."""

REORDERED = {
    "in pieces": Case((*COPY, PIECES, "model.mechanism=rope"), counted=True),
    "clipped": Case((*COPY, CLIPPED, "model.mechanism=rope")),
    "text, clipped, in pieces": Case((*TEXT, PIECES, CLIPPED, "model.mechanism=rope"), large_vocabulary=True),
}
"""Sums in another order. RoPE, as its gradients are continuous in the weights."""

COMPILED = {"compiled": Case((*COPY, "train.compile=on", "train.checkpoint_activations=true", "model.mechanism=rope"))}
STEPS = 4


def cases(world: int) -> dict[str, Case]:
    return SAME_BITS | REORDERED | COMPILED if world == 2 else REORDERED


def run_config(case: Case, store: Path, *changes: str) -> RunConfig:
    data = (f"task.arguments.data={store}", "task.arguments.window=33") if case.changes[0] == TEXT[0] else ()
    if data:
        data = ("task.arguments={}", *data)
    name, *rest = case.changes
    return preset("demo").override([*COMMON, name, *data, *rest, f"train.batch_size={case.batch_size}", *changes])


def make_trainer(config: RunConfig, folder: Path, ranks: Ranks | None = None) -> Trainer:
    return Trainer(config, RunFolder(folder), CPU, ranks=ranks)


def train_case(case: Case, config: RunConfig, folder: Path, ranks: Ranks | None = None) -> dict[str, Tensor]:
    """Return the loss of each step, and the weights after the last; of the first process, others return nothing."""
    ranks = Ranks() if ranks is None else ranks
    limit = loss_module.LARGE_VOCABULARY
    if case.large_vocabulary:
        loss_module.LARGE_VOCABULARY = 1
    try:
        trainer = make_trainer(config, folder, ranks)
        if case.triton:
            for layer in trainer.model.layers:
                layer.get_submodule("self_attn").impl = "triton"  # type: ignore[assignment]
        losses = []
        for _ in range(STEPS):
            trainer.window.zero_()
            trainer.one_step()
            losses.append(trainer.window[0].clone())
            trainer._statistics()
        exchanges = Exchanges()
        with exchanges if case.counted else contextlib.nullcontext():
            trainer.one_step()
        release(trainer.loss)
        found = whole_tensors(trainer.model.state_dict(), ranks) | {"losses": torch.stack(losses)}
        return found | {f"sent.{name}": torch.tensor(number) for name, number in exchanges.found.items()}
    finally:
        loss_module.LARGE_VOCABULARY = limit


def checkpoint_steps(ranks: Ranks, folder: Path, run: str, steps: int, case: Case = SAME_BITS["padded rows"]) -> None:
    """Resume a sharded run, train some steps, save; write what was restored and what was saved as whole tensors."""
    trainer = make_trainer(run_config(case, folder, "train.parallel=fsdp"), folder / run, ranks)

    def write(name: str) -> None:
        tensors = whole_tensors(trainer._tensors(), ranks)
        if ranks.is_first:
            save_file(tensors, folder / f"{run}-{name}.safetensors")

    write(f"restored-{trainer.step}-{ranks.world}")
    for _ in range(steps):
        trainer.one_step()
    trainer._save()
    write(f"saved-{trainer.step}")


def main(folder: Path) -> None:
    with join_processes(CPU) as ranks:
        for engine in ("ddp", "fsdp"):
            for name, case in cases(ranks.world).items():
                config = run_config(case, folder / "store", f"train.parallel={engine}")
                found = train_case(case, config, folder / "no-run", ranks)
                if ranks.is_first:
                    save_file(found, folder / f"{engine}, {ranks.world}, {name}.safetensors")
        checkpoint_steps(ranks, folder, "down", 3)  # first over 4 processes, then over 2
        if ranks.world == 2:
            checkpoint_steps(ranks, folder, "up", 1)  # from one process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
