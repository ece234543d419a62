"""Prepare the cells of a suite, start each as a process, and report how it ended: common to all engines."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tra.runs import LockedError, RunFolder, open_to_append
from tra.runs.processes import python_command
from tra.suite.grid import Cell
from tra.suite.state import clear_failure, is_done, read_failure, record_failure

CUT_OFF = 75
"""Exit status of a cell that saved in time and has more to do (EX_TEMPFAIL)."""


class Report(NamedTuple):
    """The state of a cell."""

    name: str
    status: str  # "started", "done", "skipped", "failed", "cut off"
    seconds: float = 0.0
    last_lines: str = ""


class Reports:
    """The newest report of each cell, passed on as it comes."""

    def __init__(self, progress: Callable[[Report], None]) -> None:
        self.progress = progress
        self.newest: dict[str, Report] = {}

    def add(self, report: Report) -> None:
        self.newest[report.name] = report
        self.progress(report)


def prepare_cells(cells: Sequence[Cell], out: Path, retry: bool, reports: Reports) -> list[Cell]:
    """Make a folder for every cell, and return the cells that are left to run."""
    waiting = []
    for cell in cells:
        folder = out / cell.folder
        with contextlib.suppress(LockedError):  # by another process that works on the cell
            RunFolder(folder).start(cell.config, resume=True, overwrite=False)
        failure = read_failure(folder)
        if is_done(folder):
            clear_failure(folder)
            reports.add(Report(cell.name, "skipped"))
        elif failure is not None and not retry:
            reports.add(Report(cell.name, "failed", 0.0, failure["last_lines"]))
        else:
            clear_failure(folder)
            waiting.append(cell)
    return waiting


def start_cell(
    folder: Path,
    device: str | None,
    environment: Mapping[str, str],
    seconds: float | None = None,
    new_session: bool = False,
    imports: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start the process of a cell, whose output is appended to log.txt in its folder.

    Args:
        imports: The user's files that the process imports first.
    """
    limit = "-" if seconds is None else str(seconds)
    command = python_command("-m", "tra.suite.cell", str(folder), device or "-", limit, *imports)
    environment = {**environment, "TRA_PARENT": str(os.getpid())}
    with open_to_append(folder / "log.txt") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=new_session)


def cell_environment(out: Path, threads: int) -> dict[str, str]:
    """Return the environment of a cell's process. All cells of a suite share compiled code."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str((out / ".cache" / "inductor").resolve()),
        "TRITON_CACHE_DIR": str((out / ".cache" / "triton").resolve()),
    }
    own = {"OMP_NUM_THREADS": str(threads), "TRA_ARGUMENTS": shlex.join(sys.argv[1:])}
    return caches | dict(os.environ) | own


def report_end(cell: Cell, out: Path, status: int, seconds: float, stopped: bool = False) -> Report:
    """Return the report of a cell whose process ended with a status, and record a failure.

    Args:
        stopped: The suite stopped the process, so no status is a failure.
    """
    if status == 0:
        return Report(cell.name, "done", seconds)
    if status == CUT_OFF or stopped:
        return Report(cell.name, "cut off", seconds)
    if is_done(out / cell.folder):  # killed after it had written its last result
        return Report(cell.name, "done", seconds)
    return Report(cell.name, "failed", seconds, record_failure(out / cell.folder, status))
