"""Cells of a suite in an hour, by how many run side by side on one device.

The cells are the paper's mini flip-flop cut to few steps, with a share of its evaluation. One more cell
runs first and isn't counted, so that all others find compiled code.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from tra.presets import preset
from tra.runs import environment
from tra.suite.grid import Cell
from tra.suite.local import run_suite

CHANGES = (
    "train.steps=2000",
    "train.checkpoint_every=1000",
    "evaluate.examples=1000",
    "evaluate.examples_of={}",
    'evaluate.splits=["iid","sparse"]',
)


def bench_cells(
    device: str,
    jobs: Sequence[int] = (1, 2, 4),
    number: int = 4,
    name: str = "flipflop",
    changes: Sequence[str] = CHANGES,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return a row per number of `jobs`: the time of `number` cells."""

    def cell(seed: int) -> Cell:
        return Cell(f"{name}-{seed}", preset(name).override([*changes, f"train.seed={seed}"]))

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        progress("a first cell, for the compiler")
        _run([cell(1000)], out, 1, device)
        for at_once in jobs:
            progress(f"{number} cells, {at_once} at a time")
            begun = time.monotonic()
            _run([cell(100 * at_once + seed) for seed in range(number)], out, at_once, device)
            seconds = time.monotonic() - begun
            rows.append(
                {
                    "jobs": at_once,
                    "cells": number,
                    "seconds": round(seconds, 1),
                    "cells_per_hour": round(3600 * number / seconds, 1),
                }
            )
    facts = {"config": cell(0).config.to_dict()}
    return {"environment": environment(torch.device(device)), **facts, "rows": rows}


def _run(cells: list[Cell], out: Path, jobs: int, device: str) -> None:
    for report in run_suite(cells, out, jobs=jobs, device=device):
        if report.status != "done":
            raise RuntimeError(f"{report.name} {report.status}: {report.last_lines}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = command.parser("cells", __doc__).parse_args(arguments)
    command.show(bench_cells(str(command.pick_device(options.device)), progress=command.progress), options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
