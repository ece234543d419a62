"""Train and measure one cell, in a process of its own: `python -m tra.suite.cell FOLDER [DEVICE [SECONDS [FILE ...]]]`.

"-" stands for no device and no limit in time. The files are the user's, and are imported first. If the environment has
`TRA_PARENT`, the number of the process that started this one, the cell saves and ends when that process has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tra.evaluation import diagnose_run, diagnose_task, evaluate_run, evaluate_run_text, evaluate_task, evaluate_text
from tra.model import Decoder
from tra.runs import LockedError, RunFolder, folder_lock, import_file
from tra.runs.failures import explain_failure, one_line
from tra.suite.cell_process import CUT_OFF
from tra.suite.state import missing
from tra.text.task import Text
from tra.training import DiskFullError, NonFiniteError, Progress, pick_device, train

LOCK_SECONDS = 60.0
"""Time to wait for another process that still works on the cell, and may be saving."""


def run_cell(folder: Path, device_name: str | None, seconds: float | None = None) -> int:
    """Run a cell and return the exit status. Bad input, and failures of the machine, are one line of the log."""
    try:
        return _run_locked(folder, device_name, seconds)
    except Exception as error:
        line = str(error) if isinstance(error, ValueError) else explain_failure(error)
        if line is None:
            raise
        print(one_line(line), flush=True)
        return 1


def _run_locked(folder: Path, device_name: str | None, seconds: float | None) -> int:
    """Train to the end, measure what is missing, or stop in time; print progress and return the exit status."""
    deadline = None if seconds is None else time.monotonic() + seconds
    device, run = pick_device(device_name), RunFolder(folder)
    try:
        with folder_lock(folder, wait=LOCK_SECONDS):
            return _train_and_measure(run, device, seconds, deadline)
    except LockedError:
        print("another process works on this cell", flush=True)
        return CUT_OFF


def _train_and_measure(run: RunFolder, device: torch.device, seconds: float | None, deadline: float | None) -> int:
    def print_loss(progress: Progress) -> None:
        if progress.metrics is not None:
            print(f"step {progress.step} loss {progress.metrics['loss']:.4f}", flush=True)

    result = train(None, run.path, resume=True, time_limit=seconds, device=device, progress=print_loss)
    if not result.done:
        print(f"stopped at step {result.step}: {result.reason}", flush=True)
        return CUT_OFF if result.reason == "time limit" else 143
    for line in _measure(run, run.load_model(device), device):
        print(line, flush=True)
        if deadline is not None and time.monotonic() > deadline and not missing(run).nothing:
            print("stopped between two measurements: time limit", flush=True)
            return CUT_OFF
    return 0


def _end_with_parent() -> None:
    """Save and stop when the process that started this one has ended, perhaps before this is called."""
    parent = int(os.environ.get("TRA_PARENT", os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _measure(run: RunFolder, model: Decoder, device: torch.device) -> Iterator[str]:
    """Measure what is missing, write each result to its file, and yield a line about it."""
    config, left = run.config(), missing(run)
    task = config.task.build()
    if isinstance(task, Text):
        if left.windows:
            tokens = config.evaluate.batch_tokens
            results = evaluate_text(model, task.stream("valid"), left.windows, batch_tokens=tokens, device=device)
            for measured in evaluate_run_text(run, results):
                yield f"{measured.text}, {measured.window}: {measured.perplexity:.3f}"
        return
    if left.splits:
        evaluated = evaluate_task(model, task, config.evaluate, splits=left.splits, device=device)
        for found in evaluate_run(run, evaluated):
            yield f"{found.split}: {found.exact:.4f}"
    if left.diagnoses:
        diagnosed = diagnose_task(model, task, config.evaluate, splits=left.diagnoses, device=device)
        for diagnosis in diagnose_run(run, diagnosed):
            yield f"{diagnosis.split}: diagnosed"


def main() -> int:
    """Run the cell that the command line names. What may go wrong ends in one line of the log, not in a traceback."""
    _end_with_parent()
    device, seconds = (None if text == "-" else text for text in (*sys.argv[2:4], "-", "-")[:2])
    try:
        for file in sys.argv[4:]:
            import_file(file)
        return run_cell(Path(sys.argv[1]), device, None if seconds is None else float(seconds))
    except (ValueError, OSError, DiskFullError, NonFiniteError) as error:
        print(error, flush=True)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
