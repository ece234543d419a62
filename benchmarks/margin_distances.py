"""Compare two distances of a key inside the margin: the number n of counted keys right of it, or n + 1.

With n + 1 a key always counts itself in its own distance, so that no distance is below 1. Both forms are plain PyTorch,
compiled on a GPU. Each cell is trained in its own process.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks import command
from tra.attention import MECHANISMS, AttentionInputs, DenseAttention, scores, visible_keys
from tra.attention.shared.forget_gate import ForgetGate
from tra.ops.compiler_workarounds import count_from_the_right
from tra.presets import preset
from tra.runs import RunFolder
from tra.suite import cell
from tra.suite.grid import Cell

MARGIN = 2.0
SPLITS = {
    "flipflop-quick": ["iid", "sparse", "dense", "4x", "16x"],
    "induct-quick": ["iid", "251-300", "8x", "16x"],
    "copy-quick": ["iid", "251-300", "8x", "16x"],
}


class MarginAttention(DenseAttention):
    """TRA with a margin of 2, in which a margin key's distance is n."""

    default_qk_norm: ClassVar[bool] = True
    added: ClassVar[int] = 0

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int | None = None, **options: bool | float) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, **options)  # type: ignore[arg-type]
        self.gate = ForgetGate(d_model, n_heads, 0.0, fused=self.fuse_projections)

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        content, visible = scores(inputs, rows), visible_keys(inputs, rows)
        counted = visible & ~(content <= 0)
        distances = count_from_the_right(counted, content.dtype) + self.added * ~counted
        biased = content + self.gate(inputs.x)[:, :, rows, None] * distances
        return torch.where(visible & ~(content <= -MARGIN), biased, -torch.inf)


class OneMoreAttention(MarginAttention):
    """TRA with a margin of 2, in which a margin key's distance is n + 1."""

    added: ClassVar[int] = 1


FORMS: dict[str, type[DenseAttention]] = {"margin-n": MarginAttention, "margin-n-plus-1": OneMoreAttention}


def cells(data: str | None, tasks: Sequence[str] = tuple(SPLITS), seeds: Sequence[int] = (0, 1)) -> list[Cell]:
    """Return the cells, longest first. Without a token store there are none of language."""
    found = []
    for seed, form in itertools.product(seeds, FORMS if data is not None else ()):
        changes = [f"task.arguments.data={data}", f"model.mechanism={form}", "evaluate.windows=[128,1024]"]
        changes += [f"train.seed={seed}", "train.steps=2500", "train.checkpoint_every=100000"]
        found.append(Cell(f"language-{form}-{seed}", preset("wikitext-quick").override(changes)))
    for task, splits in SPLITS.items():
        for seed in seeds if task in tasks else ():
            for form in FORMS:
                changes = [f"model.mechanism={form}", f"train.seed={seed}", f"evaluate.splits={json.dumps(splits)}"]
                config = preset(task).override([*changes, "evaluate.examples_of={}", "train.checkpoint_every=100000"])
                found.append(Cell(f"{task}-{form}-{seed}", config))
    return found


def run_all(found: Sequence[Cell], out: Path, jobs: int, device: str) -> list[str]:
    """Run the cells, `jobs` at a time, and return the names of those that failed."""
    waiting, running, failed = list(found), {}, []
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    while waiting or running:
        while waiting and len(running) < jobs:
            one = waiting.pop(0)
            folder = out / one.name
            RunFolder(folder).start(one.config, resume=True, overwrite=False)
            call = [sys.executable, "-m", "benchmarks.margin_distances", "--cell", str(folder), "--device", device]
            with (folder / "log.txt").open("ab") as log:
                process = subprocess.Popen(call, stdout=log, stderr=log, env=environment)
            running[one.name] = (process, time.monotonic())
        time.sleep(0.2)
        for name, (process, begun) in list(running.items()):
            if process.poll() is not None:
                del running[name]
                command.progress(f"{name} ended with {process.returncode} after {time.monotonic() - begun:.0f} s")
                failed += [name] if process.returncode else []
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("margin_distances", __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/margin-distances"))
    parser.add_argument("--data", help="a token store for language; without one, the synthetic tasks alone")
    parser.add_argument("--tasks", nargs="*", default=list(SPLITS), help="synthetic tasks (default: all)")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--cell", type=Path, help="train this one folder (used by the script itself)")
    options = parser.parse_args(arguments)
    MECHANISMS.update(FORMS)
    device = str(command.pick_device(options.device))
    if options.cell is not None:
        return cell.run_cell(options.cell, device)
    failed = run_all(cells(options.data, options.tasks, options.seeds), options.out, options.jobs, device)
    rows = []
    for folder in sorted(path.parent for path in options.out.glob("*/config.json")):
        for name in ("eval.jsonl", "perplexity.jsonl"):
            if (folder / name).is_file():
                rows += [{"run": folder.name} | json.loads(line) for line in (folder / name).read_text().splitlines()]
    shown = ("run", "split", "exact", "text", "window", "perplexity")
    command.show({"rows": [{key: row[key] for key in shown if key in row} for row in rows]}, options.json)
    return 1 if failed else 0


if __name__ == "__main__":
    command.run(main)
