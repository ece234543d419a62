"""`tra demo`: train TRA, with and without a margin, and two rivals on a small task; test them on longer sequences."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tra.config import RunConfig
    from tra.evaluation.exact_match import SplitResult

DESCRIPTION = """Train TRA, TRA with a margin, RoPE and FoT on a small task, and see which of
them works on longer sequences. Takes minutes on a laptop. Shows a table; saves
a figure, a page and the four runs."""

RUNS = {
    "tra": ["model.mechanism=tra"],
    "tra-margin-2": ["model.mechanism=tra", "model.margin=2"],
    "rope": ["model.mechanism=rope"],
    "forgetting": ["model.mechanism=forgetting"],
}
"""Changes of each run to the preset, by the run's folder."""

INTRODUCTION = """\
Flip-flop: remember the last written bit through noise. Trained on {length} symbols, tested on up to {longest:,}.
Test sets: iid as in training; sparse with more noise, dense with less; 4x and 16x as long."""

CONCLUSION = """\
Keys that don't matter leave TRA's softmax and don't count as distance, so a longer sequence looks like a short one.
With a margin, keys just below the threshold stay, which is meant to make TRA easier to train.
RoPE's numbers vary by machine, as sums round differently on each: dense was 0.90-0.96, and 4x 0.09-0.25.
Figure: {out}/exact-match.png. Runs: {out}. Next: . .venv/bin/activate; tra train --help
All of it, to open in a browser: {out}/report.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo"),
        metavar="FOLDER",
        help="where runs, figure and page go (default: demo); replaces the runs of an earlier demo, nothing else",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and data (default: 0)")


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tra.cli.display import results_table
    from tra.presets import preset
    from tra.runs import variant_of

    console = Console()
    task = preset("demo").task.build()
    length = task.lengths("train").longest
    console.print(INTRODUCTION.format(length=length, longest=16 * length), highlight=False)
    results: dict[str, list[SplitResult]] = {}
    for name, changes in RUNS.items():
        config = preset("demo").override([*changes, f"train.seed={options.seed}"])
        variant, folder = variant_of(asdict(config.model)), options.out / name
        stopped_at = _train(variant, config, folder)
        if stopped_at is not None:
            console.print(f"stopped at step {stopped_at:,} of {variant}")
            return 130
        results[variant] = _evaluate(folder, options.seed)
    console.print(results_table(results))
    _draw(results, options.out, length)
    console.print(CONCLUSION.format(out=options.out), highlight=False)
    return 0


def _train(variant: str, config: RunConfig, folder: Path) -> int | None:
    """Train one run; return the step at which it was interrupted, None if it ended."""
    from tra.cli.display import TrainingDisplay
    from tra.training import pick_device, train

    with TrainingDisplay(variant) as display:
        result = train(config, folder, overwrite=True, device=pick_device("cpu"), progress=display)
    return None if result.done else result.step


def _evaluate(folder: Path, seed: int) -> list[SplitResult]:
    """Evaluate one run, and save attention maps for the page."""
    from tra.cli.display import EvaluationDisplay
    from tra.evaluation.attention_maps import attend, task_sequence
    from tra.evaluation.exact_match import evaluate_run, evaluate_task
    from tra.runs import RunFolder, write_arrays

    run = RunFolder(folder)
    config, model = run.config(), run.load_model()
    task = config.task.build()
    with EvaluationDisplay() as display:
        results = list(evaluate_run(run, evaluate_task(model, task, config.evaluate, progress=display)))
    write_arrays(folder / "attend.npz", attend(model, task_sequence(task, "iid", seed))._asdict())
    return results


def _draw(results: dict[str, list[SplitResult]], out: Path, length: int) -> None:
    """Save the figure and the page."""
    from tra.report.exact_match import draw_exact_match
    from tra.report.page import write_page

    rows = {variant: [asdict(result) for result in splits] for variant, splits in results.items()}
    draw_exact_match(rows, out / "exact-match.png", title=f"Flip-flop, trained on {length} symbols")
    write_page([out / name for name in RUNS], out / "report.html")
