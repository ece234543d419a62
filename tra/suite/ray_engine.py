"""Run a suite on a Ray cluster: cells are tasks that share GPUs, and are started again when their worker dies.

All machines must see the folder that the cells work in, and the user's files that they need, for example over a network
file system.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tra.runs import open_to_append
from tra.runs.extensions import imported_paths
from tra.runs.failures import pip_install
from tra.suite.cell_process import Report, Reports, cell_environment, prepare_cells, report_end, start_cell
from tra.suite.grid import Cell

MAX_RESTARTS = 3
"""Times a cell is started again after its worker died. A cell that itself fails is not started again."""


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
    """Run all cells that aren't done on the cluster that RAY_ADDRESS names, or on one made of this machine.

    Args:
        jobs: Cells that share a GPU; on a CPU, cells at a time.

    The other arguments are those of `run_suite`.
    """
    try:
        import ray
    except ImportError:
        raise ValueError(f"--engine ray needs Ray: {pip_install('ray>=2.40')}") from None
    out = out.resolve()
    reports = Reports(progress)
    waiting = prepare_cells(cells, out, retry, reports)
    address = os.environ.get("RAY_ADDRESS")
    local: Any = {} if address else {"num_cpus": jobs, "include_dashboard": False}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    try:
        on_gpu = device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        task: Any = ray.remote(num_cpus=1, num_gpus=1 / jobs if on_gpu else 0, max_retries=MAX_RESTARTS)(_run_cell)
        environment = cell_environment(out, threads=1)
        begun = time.monotonic()
        pending = {}
        for cell in waiting:
            pending[task.remote(str(out / cell.folder), device, environment, imported_paths(cell.config.imports))] = (
                cell
            )
            reports.add(Report(cell.name, "started"))
        while pending:
            ended, _ = ray.wait(list(pending), timeout=0.5)
            tick()
            for reference in ended:
                cell = pending.pop(reference)
                try:
                    status = ray.get(reference)
                except Exception as error:  # Ray raises many kinds for a worker that died too often
                    with open_to_append(out / cell.folder / "log.txt") as log:
                        log.write(f"{type(error).__name__}: {str(error).splitlines()[0]}\n".encode())
                    status = 1
                reports.add(report_end(cell, out, status, time.monotonic() - begun))
    finally:
        ray.shutdown()
    return list(reports.newest.values())


def _run_cell(folder: str, device: str | None, environment: dict[str, str], imports: Sequence[str] = ()) -> int:
    """Run a cell in a Ray worker, as a process that saves and ends when the worker dies; return its exit status.

    The process has a session of its own: Ray kills a dead worker's process group after 0.2 s, too soon to save.
    """
    own = {name: value for name, value in os.environ.items() if name.startswith(("CUDA", "RAY"))}
    return start_cell(Path(folder), device, environment | own, new_session=True, imports=imports).wait()
