"""One cell to its end, in a process of its own: `python -m tra.suite.cell FOLDER DEVICE`."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

from tra.attention import MECHANISMS
from tra.diagnose import diagnose_run, diagnose_task
from tra.evaluate import chosen_splits, evaluate_run, evaluate_task
from tra.perplexity import evaluate_run_text, evaluate_text, windows_that_fit
from tra.rows import read_rows
from tra.run import RunFolder
from tra.text.task import Text
from tra.train import Progress, pick_device, train


def is_done(folder: Path) -> bool:
    """Trained, evaluated on every split of its config, and diagnosed where there is attention to look at.

    Of text: trained, with the perplexity of its validation text at every window of its config.
    """
    run = RunFolder(folder)
    if not run.config_file.is_file() or not run.weights_file.is_file():
        return False
    config = run.config()
    task = config.task.build()
    if isinstance(task, Text):
        stream = task.stream("valid")
        rows = read_rows(run.perplexity_file)
        windows = config.evaluate.windows or windows_that_fit(stream)
        seen = {(row["text"], row["window"]) for row in rows if row["overlap"] == "none"}
        return {(stream.name, window) for window in windows} <= seen
    files = [run.evaluation_file]
    if not MECHANISMS[config.model.mechanism].replaces_mlp:
        files.append(run.diagnosis_file)
    wanted = set(chosen_splits(task, config.evaluate))
    return all(wanted <= {row["split"] for row in read_rows(file)} for file in files)


def run_cell(folder: Path, device_name: str | None) -> int:
    """Train (or go on), evaluate, diagnose. Says what it does line by line."""
    device, run = pick_device(device_name), RunFolder(folder)

    def say(progress: Progress) -> None:
        if progress.metrics is not None:
            print(f"step {progress.step} loss {progress.metrics['loss']:.4f}", flush=True)

    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another process works on this cell", flush=True)
        return 1
    result = train(None, folder, resume=True, device=device, progress=say)
    if not result.done:
        print(f"stopped at step {result.step}: {result.reason}", flush=True)
        return 143
    config, model = run.config(), run.load_model(device)
    task = config.task.build()
    if isinstance(task, Text):
        stream = task.stream("valid")
        windows = config.evaluate.windows or windows_that_fit(stream)
        results = evaluate_text(model, stream, windows, batch_tokens=config.evaluate.batch_tokens, device=device)
        for measured in evaluate_run_text(run, results):
            print(f"{measured.text}, {measured.window}: {measured.perplexity:.3f}", flush=True)
        return 0
    for found in evaluate_run(run, evaluate_task(model, task, config.evaluate, device=device)):
        print(f"{found.split}: {found.exact:.4f}", flush=True)
    if not MECHANISMS[config.model.mechanism].replaces_mlp:
        for diagnosis in diagnose_run(run, diagnose_task(model, task, config.evaluate, device=device)):
            print(f"{diagnosis.split}: diagnosed", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cell(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
