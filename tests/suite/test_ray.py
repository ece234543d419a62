"""A small grid on a Ray cluster of this machine, one of whose workers is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.suite.test_local import cell, processes_of
from tra.runs import read_rows
from tra.suite.cell_process import Report
from tra.suite.ray_engine import run_on_ray
from tra.suite.state import is_done

pytest.importorskip("ray")


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_grid_completes_though_a_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    long, short = cell("rope", steps=600), cell("nope")
    groups: list[tuple[int, int]] = []

    def kill_its_worker() -> None:
        metrics = tmp_path / long.folder / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while len(read_rows(metrics)) < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes_of(long.folder):
            worker = parent_of(process)
            groups.append((os.getpgid(process), os.getpgid(worker)))
            os.kill(worker, signal.SIGKILL)

    killer = threading.Thread(target=kill_its_worker)
    killer.start()
    seen: list[Report] = []
    reports = run_on_ray([long, short], tmp_path, jobs=2, device="cpu", progress=seen.append)
    killer.join()
    ((its_own, of_its_worker),) = groups
    assert its_own != of_its_worker  # Ray gives what is left of a dead worker's group 0.2 s to save
    assert {report.name: report.status for report in reports} == {"rope-0": "done", "nope-0": "done"}
    assert is_done(tmp_path / long.folder)
    assert is_done(tmp_path / short.folder)
    assert "stopped at step" in (tmp_path / long.folder / "log.txt").read_text()  # it saved, and went on elsewhere
    steps = [row["step"] for row in read_rows(tmp_path / long.folder / "metrics.jsonl")]
    assert steps == list(range(2, 601, 2))
