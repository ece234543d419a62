"""Run a suite on this machine: several cells at a time, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tra.runs.extensions import imported_paths
from tra.suite.cell_process import Report, Reports, cell_environment, prepare_cells, report_end, start_cell
from tra.suite.grid import Cell

MIN_CELL_SECONDS = 15.0
"""Time below which no cell is started: it would hardly finish its imports."""

GRACE_SECONDS = 10.0
"""Time between a cell's own deadline and the end of the budget: for a step, a checkpoint, or a measured split."""

POLL_SECONDS = 0.1


class RunningCell(NamedTuple):
    """A cell and its process."""

    cell: Cell
    process: subprocess.Popen[bytes]
    begun: float


def run_suite(
    cells: Sequence[Cell],
    out: Path,
    *,
    jobs: int = 1,
    device: str | None = None,
    budget: float | None = None,
    retry: bool = False,
    progress: Callable[[Report], None] = lambda _: None,
    tick: Callable[[], None] = lambda: None,
) -> list[Report]:
    """Run all cells that aren't done, `jobs` at a time, each in its folder under `out`.

    Args:
        budget: Seconds after which everything has been saved and this returns. Cells are started while there is time
            for something, and checkpoint before it is over.
        retry: Also run cells that failed before.
        progress: Called with the report of each cell that starts or ends.
        tick: Called several times a second.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    least = MIN_CELL_SECONDS + GRACE_SECONDS
    if budget is not None and budget < least:
        raise ValueError(f"a budget of {budget:.0f}s is too short for anything: it takes {least:.0f}s at least")
    end = None if budget is None else time.monotonic() + budget
    environment = cell_environment(out, threads=max(1, (os.cpu_count() or 1) // jobs))
    reports = Reports(progress)
    waiting = prepare_cells(cells, out, retry, reports)
    running: list[RunningCell] = []
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                left = None if end is None else end - GRACE_SECONDS - time.monotonic()
                if left is not None and left < MIN_CELL_SECONDS:
                    for cell in waiting:
                        reports.add(Report(cell.name, "cut off"))
                    waiting = []
                    break
                cell = waiting.pop(0)
                reports.add(Report(cell.name, "started"))
                process = start_cell(
                    out / cell.folder, device, environment, left, imports=imported_paths(cell.config.imports)
                )
                running.append(RunningCell(cell, process, time.monotonic()))
            time.sleep(POLL_SECONDS)
            tick()
            is_late = end is not None and time.monotonic() > end
            if is_late:  # cells in a long measurement, which will be made again
                _stop(running)
            for entry in list(running):
                if entry.process.poll() is not None:
                    running.remove(entry)
                    seconds = time.monotonic() - entry.begun
                    reports.add(report_end(entry.cell, out, entry.process.returncode, seconds, stopped=is_late))
    finally:
        _stop(running)
        signal.signal(signal.SIGTERM, before)
    return list(reports.newest.values())


def _stop(running: Sequence[RunningCell]) -> None:
    """Tell cells to checkpoint and end, and wait until they have."""
    for entry in running:
        entry.process.terminate()
    for entry in running:
        entry.process.wait()


def _exit(_number: int, _frame: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)
