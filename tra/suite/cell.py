"""One cell to its end, in a process of its own: `python -m tra.suite.cell FOLDER [DEVICE [SECONDS]]`."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from tra.evaluation.diagnosis import diagnose_run, diagnose_task
from tra.evaluation.exact_match import evaluate_run, evaluate_task
from tra.evaluation.perplexity import evaluate_run_text, evaluate_text
from tra.model import Decoder
from tra.runs import RunFolder
from tra.suite.state import is_done, missing
from tra.text.task import Text
from tra.training.trainer import Progress, pick_device, train

__all__ = ["CUT_OFF", "is_done", "run_cell"]

CUT_OFF = 75
"""Exit status of a cell that saved in time and has more to do (EX_TEMPFAIL)."""


PATIENCE = 20.0
"""Seconds to wait for another process to leave the cell."""


def run_cell(folder: Path, device_name: str | None, seconds: float | None = None) -> int:
    """Train (or go on), then measure what is missing. Says what it does line by line; stops in time."""
    deadline = None if seconds is None else time.monotonic() + seconds
    device, run = pick_device(device_name), RunFolder(folder)

    def say(progress: Progress) -> None:
        if progress.metrics is not None:
            print(f"step {progress.step} loss {progress.metrics['loss']:.4f}", flush=True)

    lock = (folder / "lock").open("w")
    if not _locked(lock):
        print("another process works on this cell", flush=True)
        return CUT_OFF
    result = train(None, folder, resume=True, time_limit=seconds, device=device, progress=say)
    if not result.done:
        print(f"stopped at step {result.step}: {result.reason}", flush=True)
        return CUT_OFF if result.reason == "time limit" else 143
    for line in _measure(run, run.load_model(device), device):
        print(line, flush=True)
        if deadline is not None and time.monotonic() > deadline and not missing(run).nothing:
            print("stopped between two measurements: time limit", flush=True)
            return CUT_OFF
    return 0


def _locked(lock: IO[str]) -> bool:
    """Whoever had it before may be saving still."""
    patience = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > patience:
                return False
            time.sleep(0.1)


def _end_with_parent() -> None:
    """Stop, and save, when whoever started this is gone: nobody would wait for it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _measure(run: RunFolder, model: Decoder, device: torch.device) -> Iterator[str]:
    """What is missing, each written to its file as it comes."""
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


if __name__ == "__main__":
    _end_with_parent()
    device_given = sys.argv[2] if len(sys.argv) > 2 and sys.argv[2] != "-" else None
    raise SystemExit(run_cell(Path(sys.argv[1]), device_given, float(sys.argv[3]) if len(sys.argv) > 3 else None))
