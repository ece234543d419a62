"""A suite on this machine: several cells side by side, each a process. What is done is skipped, the rest goes on."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tra.runs import RunFolder
from tra.suite.cell import CUT_OFF
from tra.suite.grid import Cell
from tra.suite.state import forget_failure, is_done, note_failure, read_failure

LEAST_SECONDS = 15.0
"""A cell isn't started for less: it would hardly have imported what it needs."""

GRACE_SECONDS = 10.0
"""Between the time a cell is given and that at which it is ended: a step, a checkpoint, a split of an evaluation."""


class Report(NamedTuple):
    """What has become of a cell."""

    name: str
    status: str  # "started", "done", "skipped", "failed", "cut off"
    seconds: float = 0.0
    last_lines: str = ""


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
        retry: Run those again that failed before.
        progress: Told what becomes of each cell.
        tick: Called several times a second.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if budget is not None and budget < LEAST_SECONDS + GRACE_SECONDS:
        least = LEAST_SECONDS + GRACE_SECONDS
        raise ValueError(f"a budget of {budget:.0f}s is too short for anything: it takes {least:.0f}s at least")
    deadline = None if budget is None else time.monotonic() + budget - GRACE_SECONDS
    reports: dict[str, Report] = {}

    def note(report: Report) -> None:
        reports[report.name] = report
        progress(report)

    waiting = prepare_cells(cells, out, retry, note)
    running: list[tuple[Cell, subprocess.Popen[bytes], float]] = []
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left < LEAST_SECONDS:
                    for cell in waiting:
                        note(Report(cell.name, "cut off"))
                    waiting = []
                    break
                cell = waiting.pop(0)
                note(Report(cell.name, "started"))
                running.append((cell, _start(out / cell.folder, out, device, jobs, left), time.monotonic()))
            time.sleep(0.1)
            tick()
            late = deadline is not None and time.monotonic() > deadline + GRACE_SECONDS
            for entry in list(running):
                cell, process, begun = entry
                if late and process.poll() is None:  # in a measurement that takes longer; it will be made again
                    process.terminate()
                    process.wait()
                if process.poll() is not None:
                    running.remove(entry)
                    note(_ended(cell, out, process.returncode, time.monotonic() - begun, late))
    finally:  # told to stop, cells checkpoint
        for _, process, _ in running:
            process.terminate()
        for _, process, _ in running:
            process.wait()
        signal.signal(signal.SIGTERM, before)
    return list(reports.values())


def prepare_cells(cells: Sequence[Cell], out: Path, retry: bool, note: Callable[[Report], None]) -> list[Cell]:
    """Folders for all; those that have something to do."""
    waiting = []
    for cell in cells:
        folder = out / cell.folder
        RunFolder(folder).start(cell.config, resume=True, overwrite=False)
        failure = read_failure(folder)
        if is_done(folder):
            note(Report(cell.name, "skipped"))
        elif failure is not None and not retry:
            note(Report(cell.name, "failed", 0.0, failure["last_lines"]))
        else:
            forget_failure(folder)
            waiting.append(cell)
    return waiting


def cell_command(folder: Path, device: str | None, seconds: float | None) -> list[str]:
    command = [sys.executable, "-m", "tra.suite.cell", str(folder), device or "-"]
    return command if seconds is None else [*command, str(seconds)]


def cell_environment(out: Path, threads: int) -> dict[str, str]:
    """Compiled code is shared by the cells of a suite."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str((out / ".cache" / "inductor").resolve()),
        "TRITON_CACHE_DIR": str((out / ".cache" / "triton").resolve()),
    }
    own = {"OMP_NUM_THREADS": str(threads), "TRA_ARGUMENTS": shlex.join(sys.argv[1:])}
    return caches | dict(os.environ) | own


def _ended(cell: Cell, out: Path, status: int, seconds: float, late: bool) -> Report:
    if status == 0:
        return Report(cell.name, "done", seconds)
    if status == CUT_OFF or late:
        return Report(cell.name, "cut off", seconds)
    return Report(cell.name, "failed", seconds, note_failure(out / cell.folder, status))


def _stop(_number: int, _frame: object) -> None:
    raise SystemExit(143)


def _start(folder: Path, out: Path, device: str | None, jobs: int, left: float | None) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            cell_command(folder, device, left), stdout=log, stderr=log, env=cell_environment(out, threads)
        )
