"""`tra attend`: draw what runs attend to on one sequence."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from tra.cli.options import add_device, add_list

if TYPE_CHECKING:
    from tra.config import RunConfig
    from tra.evaluation.attention_maps import InputSequence
    from tra.runs import RunFolder
    from tra.text.task import Text

DESCRIPTION = """Draw what runs attend to on one sequence: a map for each of the four heads with
the largest weights on single keys further back, or for all with --all-heads.
Several runs are drawn side by side.

White is a dropped key, grey a later one. With a margin, a small frame is a key
that stays without counting as distance. A query at which an answer is due has a
frame, too; one that keeps no key has a cross. The numbers of all heads go to
attend.npz in each run's folder.

  tra attend flipflop-tra --text w1i0i1r1 --layers 3
  tra attend runs/text-demo-tra runs/text-demo-rope --prompt 'Alice was'"""


MAX_HEADS = 4
"""Heads of a run that are drawn by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        default=[],
        metavar="RUN",
        help="run folders, or flipflop-tra, a run that comes with tra; several must have learnt the same task, or "
        "text with the same tokenizer",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the figure, .png, .svg or .pdf (default: attend.png in the run's folder; here, for several runs)",
    )
    add_list(parser, "--layers", "N", "layers to draw, all their heads, counted from 0 (default: see above)", int)
    add_list(parser, "--heads", "N", "heads to draw, of all layers, counted from 0 (default: see above)", int)
    parser.add_argument("--all-heads", action="store_true", help="draw every head of every layer")
    for option, what in (
        ("--rows", "queries to draw, TO not included (default: all; of more than 256 tokens the last 64)"),
        ("--keys", "keys to draw (default: up to the last query; of more than 256 tokens the same as the queries)"),
    ):
        parser.add_argument(option, type=int, nargs=2, metavar=("FROM", "TO"), help=what)
    parser.add_argument(
        "--text",
        type=str,
        metavar="TEXT",
        help="flip-flop: a sequence such as w1i0r1; language model: a token store (default: its validation text)",
    )
    add_device(parser)

    task = parser.add_argument_group("options for runs of a task")
    task.add_argument(
        "--split", metavar="SPLIT", help="the split to take a test sequence of (default: the first to be evaluated)"
    )
    task.add_argument("--seed", type=int, metavar="N", help="seed of the test sequence (default: 0)")

    text = parser.add_argument_group("options for language models")
    text.add_argument("--prompt", type=str, metavar="TEXT", help="the text to look at, instead of a store")
    text.add_argument("--start", type=int, metavar="N", help="first token to look at (default: 0)")
    text.add_argument("--window", type=int, metavar="N", help="number of tokens to look at (default: 256)")


def run(options: argparse.Namespace) -> int:
    from tra.evaluation.attention_maps import attend
    from tra.report.heatmaps import check_figure, draw_attention
    from tra.runs import SHIPPED, RunFolder, write_arrays
    from tra.training import pick_device

    if not options.runs:
        raise ValueError("name at least one run")
    device, runs = pick_device(options.device), [RunFolder.open(name) for name in options.runs]
    shipped = {run for run in runs if SHIPPED in run.path.resolve().parents}  # the package's own are never written to
    out = options.out or (Path("attend.png") if len(runs) > 1 or shipped else runs[0].path / "attend.png")
    check_figure(out)
    sequence = _sequence(options, runs)
    maps = []
    for run in runs:
        model = run.load_model(device)
        maps.append(
            attend(model, sequence, rows=options.rows, keys=options.keys, layers=options.layers, heads=options.heads)
        )
        file = out.with_name(f"{out.stem}-{run.path.name}.npz") if run in shipped else run.path / "attend.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.nullcontext() if run in shipped else run.lock():
            write_arrays(file, maps[-1]._asdict())
        print(file)
    out.parent.mkdir(parents=True, exist_ok=True)
    are_named = options.all_heads or options.layers or options.heads
    draw_attention(maps, out, most=None if are_named else MAX_HEADS)
    print(out)
    return 0


def _sequence(options: argparse.Namespace, runs: list[RunFolder]) -> InputSequence:
    """Return the sequence that all runs are shown."""
    from tra.text.task import Text

    configs = [run.config() for run in runs]
    tasks = [config.task.build() for config in configs]
    if len({(task.name, task.tokenizer if isinstance(task, Text) else task.vocabulary) for task in tasks}) > 1:
        raise ValueError("the runs learnt different tasks: attend to one at a time")
    return _text_sequence(options, tasks[0]) if isinstance(tasks[0], Text) else _task_sequence(options, configs[0])


def _text_sequence(options: argparse.Namespace, task: Text) -> InputSequence:
    from tra.evaluation.attention_maps import WINDOW, text_sequence

    if (options.split, options.seed) != (None, None):
        raise ValueError("--split and --seed are for tasks; this run learnt text")
    if options.prompt is not None and (options.text, options.start, options.window) != (None, None, None):
        raise ValueError("give either --prompt or a window of a text")
    store = None if options.text is None else Path(options.text)
    window = WINDOW if options.window is None else options.window
    return text_sequence(task, store=store, prompt=options.prompt, start=options.start or 0, window=window)


def _task_sequence(options: argparse.Namespace, config: RunConfig) -> InputSequence:
    from tra.evaluation.attention_maps import task_sequence
    from tra.evaluation.exact_match import chosen_splits

    task = config.task.build()
    if (options.prompt, options.start, options.window) != (None, None, None):
        raise ValueError(f"--prompt, --start and --window are for language models; this run learnt {task.name}")
    if options.text is not None and (options.split, options.seed) != (None, None):
        raise ValueError("give either --text or a --split with its --seed")
    split = options.split or next(iter(chosen_splits(task, config.evaluate)))
    return task_sequence(task, split, options.seed or 0, options.text)
