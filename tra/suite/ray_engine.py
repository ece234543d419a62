"""A suite on a Ray cluster: cells as tasks, each with its part of a GPU, started again when a worker dies.

All machines must see the folder that the cells work in, as over a network file system.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tra.suite.cell import CUT_OFF
from tra.suite.grid import Cell
from tra.suite.local import Report, cell_command, cell_environment, prepare_cells
from tra.suite.state import note_failure

RETRIES = 3
"""Times a cell is started again after its worker died. One that fails by itself is not."""


def run_on_ray(
    cells: Sequence[Cell],
    out: Path,
    *,
    jobs: int = 1,
    device: str | None = None,
    retry: bool = False,
    progress: Callable[[Report], None] = lambda _: None,
    tick: Callable[[], None] = lambda: None,
) -> list[Report]:
    """Run all cells that aren't done on the cluster RAY_ADDRESS names, or on one of this machine alone.

    Args:
        jobs: Cells that share a GPU; on a CPU, cells at a time.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("--engine ray needs Ray: pip install 'threshold-relative-attention[scale]'") from None
    out = out.resolve()
    reports: dict[str, Report] = {}

    def note(report: Report) -> None:
        reports[report.name] = report
        progress(report)

    waiting = prepare_cells(cells, out, retry, note)
    address = os.environ.get("RAY_ADDRESS")
    local: Any = {} if address else {"num_cpus": jobs, "include_dashboard": False}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    try:
        on_gpu = device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        task = ray.remote(num_cpus=1, num_gpus=1 / jobs if on_gpu else 0, max_retries=RETRIES)(_run_cell)
        environment = cell_environment(out, threads=1)
        begun = time.monotonic()
        pending = {}
        for cell in waiting:
            pending[task.remote(str(out / cell.folder), device, environment)] = cell
            note(Report(cell.name, "started"))
        while pending:
            ended, _ = ray.wait(list(pending), timeout=0.5)
            tick()
            for reference in ended:
                cell = pending.pop(reference)
                note(_report(cell, out, functools.partial(ray.get, reference), time.monotonic() - begun))
    finally:
        ray.shutdown()
    return list(reports.values())


def _run_cell(folder: str, device: str | None, environment: dict[str, str]) -> int:
    """In a worker: the cell as a process of its own, which ends with the worker, and saves.

    In a session of its own, since Ray kills what is left of a dead worker's group after 0.2 s, too soon to have saved.
    """
    own = {name: value for name, value in os.environ.items() if name.startswith(("CUDA", "RAY"))}
    with (Path(folder) / "log.txt").open("ab") as log:
        command = cell_command(Path(folder), device, None)
        ran = subprocess.run(
            command, stdout=log, stderr=log, env=environment | own, check=False, start_new_session=True
        )
        return ran.returncode


def _report(cell: Cell, out: Path, get: Callable[[], Any], seconds: float) -> Report:
    try:
        status = get()
    except Exception as error:  # whatever Ray has to say about a worker that died too often
        folder = out / cell.folder
        with (folder / "log.txt").open("a") as log:
            log.write(f"{type(error).__name__}: {str(error).splitlines()[0]}\n")
        return Report(cell.name, "failed", seconds, note_failure(folder, 1))
    if status == 0:
        return Report(cell.name, "done", seconds)
    if status == CUT_OFF:
        return Report(cell.name, "cut off", seconds)
    return Report(cell.name, "failed", seconds, note_failure(out / cell.folder, status))
