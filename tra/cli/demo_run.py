"""The demo: TRA and its rivals on one small task, trained here and now, and judged beyond their training length."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console

from tra.cli.display import EvaluationDisplay, TrainingDisplay, results_table
from tra.evaluation import exact_match as evaluation
from tra.evaluation.attention_maps import attend, task_sequence
from tra.presets import preset
from tra.report.exact_match import draw_exact_match
from tra.report.page import write_page
from tra.runs import RunFolder, write_arrays
from tra.training.trainer import pick_device, train

RIVALS = ("tra", "rope", "forgetting")


def run_demo(out: Path, seed: int = 0) -> int:
    """Train, evaluate, show a table, and save a figure and a page under `out`."""
    console = Console()
    device = pick_device("cpu")
    config = preset("demo")
    task = config.task.build()
    train_length = task.lengths("train").longest
    console.print(
        f"Flip-flop: remember the last written bit through noise. Trained on {train_length} symbols, "
        f"tested on up to {16 * train_length:,}.\n"
        "Test sets: iid as in training; sparse with more noise, dense with less; 4x and 16x as long.",
        highlight=False,
    )
    results: dict[str, list[evaluation.SplitResult]] = {}
    for mechanism in RIVALS:
        changes = [f"model.mechanism={mechanism}", f"train.seed={seed}"]
        folder = out / mechanism
        with TrainingDisplay(mechanism) as display:
            result = train(config.override(changes), folder, overwrite=True, device=device, progress=display)
        if not result.done:
            console.print(f"stopped at step {result.step:,} of {mechanism}")
            return 130
        run = RunFolder(folder)
        model = run.load_model()
        with EvaluationDisplay() as display:
            found = evaluation.evaluate_task(model, task, config.evaluate, progress=display)
            results[mechanism] = list(evaluation.evaluate_run(run, found))
        write_arrays(folder / "attend.npz", attend(model, task_sequence(task, "iid", seed))._asdict())
    console.print(results_table(results))
    figure = out / "exact-match.png"
    drawn = {name: [dataclasses.asdict(row) for row in rows] for name, rows in results.items()}
    draw_exact_match(drawn, figure, title=f"Flip-flop, trained on {train_length} symbols")
    page = out / "report.html"
    write_page([out / mechanism for mechanism in RIVALS], page)
    console.print(
        f"Keys that don't matter leave TRA's softmax and don't count as distance, so a longer sequence looks like a "
        f"short one.\nFigure: {figure}. Runs: {out}. Next: . .venv/bin/activate, tra train --help\n"
        f"All of it, to open in a browser: {page}",
        highlight=False,
    )
    return 0
