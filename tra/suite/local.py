"""A suite on this machine: several cells side by side, each a process. What is done is skipped, the rest goes on."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tra.run import RunFolder
from tra.suite.cell import is_done
from tra.suite.suites import Cell


class Report(NamedTuple):
    """How a cell ended."""

    name: str
    status: str  # "done", "skipped", "failed"
    seconds: float
    last_line: str


def run_suite(
    cells: list[Cell],
    out: Path,
    *,
    jobs: int = 1,
    device: str | None = None,
    progress: Callable[[Report], None] = lambda _: None,
) -> list[Report]:
    """Run all cells that aren't done, `jobs` at a time, under `out`; a run there with another config is an error."""
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    reports: list[Report] = []

    def note(report: Report) -> None:
        reports.append(report)
        progress(report)

    waiting = []
    for cell in cells:
        folder = out / cell.name
        RunFolder(folder).start(cell.config, resume=True, overwrite=False)
        if is_done(folder):
            note(Report(cell.name, "skipped", 0.0, ""))
        else:
            waiting.append(cell)
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    running: list[tuple[Cell, subprocess.Popen[bytes], float]] = []
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                running.append((cell, _start(out / cell.name, device, threads), time.monotonic()))
            time.sleep(0.1)
            for entry in [entry for entry in running if entry[1].poll() is not None]:
                running.remove(entry)
                cell, process, begun = entry
                status = "done" if process.returncode == 0 else "failed"
                note(Report(cell.name, status, time.monotonic() - begun, _last_line(out / cell.name / "log.txt")))
    finally:  # told to stop, cells checkpoint
        for _, process, _ in running:
            process.terminate()
        for _, process, _ in running:
            process.wait()
        signal.signal(signal.SIGTERM, before)
    return reports


def _stop(_number: int, _frame: object) -> None:
    raise SystemExit(143)


def _start(folder: Path, device: str | None, threads: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tra.suite.cell", str(folder), *([device] if device else [])]
    settings = {"OMP_NUM_THREADS": threads, "TRA_ARGUMENTS": shlex.join(sys.argv[1:])}
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | settings)


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
