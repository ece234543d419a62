"""`tra evaluate`: measure a trained run, by exact match or by perplexity."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tra.cli.options import add_device, add_json, add_list

if TYPE_CHECKING:
    import torch

    from tra.config import RunConfig
    from tra.evaluation.diagnosis import Diagnosis
    from tra.evaluation.exact_match import SplitResult
    from tra.runs import RunFolder
    from tra.tasks import Task
    from tra.text.task import Stream, Text

DESCRIPTION = """Measure a trained run. Results are shown, and written to the run's folder, as
they come.

A run of a task: exact match of every split, with 95 % intervals, to eval.jsonl.
A language model: perplexity by window, with intervals over documents, to
perplexity.jsonl.

  tra evaluate runs/flipflop-tra --splits iid 16x
  tra evaluate runs/wikitext-tra --text data/wikitext-103/test --overlap half"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or flipflop-tra, a run that comes with tra")
    parser.add_argument(
        "--diagnose",
        action="store_true",
        help="also measure attention by length: mass on keys of negative content score, how often position reverses "
        "the order of content, and what TRA keeps; written to diagnose.jsonl by layer and head",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the test sequences (default: 0)")
    parser.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="auto is bfloat16 on a GPU, else float32 (default: auto)",
    )
    add_device(parser)
    add_json(parser, "print a JSON line for each result instead of a table")

    task = parser.add_argument_group("options for runs of a task")
    add_list(task, "--splits", "SPLIT", "splits to measure; by default those of the run's config")
    task.add_argument("--examples", type=int, metavar="N", help="test sequences of each split")
    task.add_argument(
        "--rows", type=Path, metavar="FILE", help="score the lines of a file instead: flip-flop as text, w1i0r1..."
    )

    text = parser.add_argument_group("options for language models")
    add_list(text, "--text", "STORE", "token stores to read (tra prepare); by default the run's validation text", Path)
    add_list(text, "--windows", "N", "tokens read at a time; by default 128, 256, ... 16384 as far as they fit", int)
    text.add_argument(
        "--overlap",
        nargs="*",
        choices=("none", "half"),
        default=["none"],
        help="none: windows side by side; half: each window starts in the middle of the one before, and its second "
        "half is scored; both can be given (default: none)",
    )
    text.add_argument("--losses", action="store_true", help="also write the loss of every token, to losses-<text>.npz")
    text.add_argument(
        "--maps", type=int, default=0, metavar="N", help="also write attention maps of N windows, to maps-<text>.npz"
    )


def run(options: argparse.Namespace) -> int:
    from tra.runs import SHIPPED, RunFolder
    from tra.text.task import Text
    from tra.training import pick_device

    device, run = pick_device(options.device), RunFolder.open(options.run)
    config = run.config()
    task = config.task.build()
    is_shipped = SHIPPED in run.path.resolve().parents  # the package's own runs are never written to
    with contextlib.nullcontext() if is_shipped else run.lock():
        if isinstance(task, Text):
            _check_text_options(options, config)
            _evaluate_text(options, run, config, task, device)
        else:
            _check_task_options(options, config)
            _evaluate_task(options, run, config, task, device)
    return 0


def _check_text_options(options: argparse.Namespace, config: RunConfig) -> None:
    if options.splits or options.examples is not None or options.rows is not None:
        raise ValueError("--splits, --examples and --rows are for tasks; this run learnt text")
    if options.maps < 0:
        raise ValueError(f"--maps must not be negative, got {options.maps}")
    _check_diagnosable(options, config)


def _check_task_options(options: argparse.Namespace, config: RunConfig) -> None:
    if options.text or options.windows or options.losses or options.maps or options.overlap != ["none"]:
        raise ValueError(
            "--text, --windows, --overlap, --losses and --maps are for language models; "
            f"this run learnt {config.task.name}"
        )
    if options.diagnose and options.rows is not None:
        raise ValueError("--diagnose needs sampled sequences: give either --rows or --diagnose")
    _check_diagnosable(options, config)


def _check_diagnosable(options: argparse.Namespace, config: RunConfig) -> None:
    from tra.attention import MECHANISMS

    if options.diagnose and MECHANISMS[config.model.mechanism].replaces_mlp:
        raise ValueError(f"{config.model.mechanism} has no attention to diagnose")


def _evaluate_task(
    options: argparse.Namespace, run: RunFolder, config: RunConfig, task: Task, device: torch.device
) -> None:
    """Measure exact match, and on request attention, split by split."""
    from rich.console import Console

    from tra.cli.display import EvaluationDisplay, results_table
    from tra.evaluation.diagnosis import diagnose_run, diagnose_task
    from tra.evaluation.exact_match import evaluate_rows, evaluate_run, evaluate_task
    from tra.runs import SHIPPED, variant_of

    model, evaluate = run.load_model(device), config.evaluate
    is_shipped = SHIPPED in run.path.resolve().parents  # the package's own runs are never written to
    settings: dict[str, Any] = {"precision": options.precision, "device": device}
    with EvaluationDisplay(quiet=options.json) as display:
        results: Iterator[SplitResult]
        if options.rows is not None:
            results = iter([evaluate_rows(model, task, options.rows, evaluate, **settings)])
        else:
            settings |= {"splits": options.splits, "examples": options.examples, "seed": options.seed}
            results = evaluate_task(model, task, evaluate, **settings, progress=display)
        shown = []
        for result in results if is_shipped else evaluate_run(run, results):
            shown.append(result)
            line = f"{result.split}: {result.exact:.4f} of {result.examples:,} in {result.seconds:.0f}s"
            _show_result(result, line, options, display.live)
    if not options.json:
        Console().print(results_table({variant_of(asdict(config.model)): shown}))
    if options.diagnose:
        with EvaluationDisplay("diagnosing", quiet=options.json) as display:
            rows = diagnose_task(
                model, task, evaluate, splits=options.splits, seed=options.seed, device=device, progress=display
            )
            diagnoses = list(rows if is_shipped else diagnose_run(run, rows))
        _show_diagnoses(diagnoses, options)


def _evaluate_text(
    options: argparse.Namespace, run: RunFolder, config: RunConfig, task: Text, device: torch.device
) -> None:
    """Measure perplexity, and on request attention, text by text and window by window."""
    from rich.console import Console

    from tra.cli.display import EvaluationDisplay, perplexity_table
    from tra.evaluation import diagnosis, perplexity
    from tra.evaluation.attention_maps import write_maps

    streams, model = _streams(options, task), run.load_model(device)
    shown, diagnoses = [], []
    for stream in streams:
        windows = options.windows or config.evaluate.windows or perplexity.windows_that_fit(stream)
        with EvaluationDisplay(quiet=options.json) as display:
            results = perplexity.evaluate_text(
                model,
                stream,
                windows,
                options.overlap,
                batch_tokens=config.evaluate.batch_tokens,
                device=device,
                precision=options.precision,
                progress=display,
            )
            for result in perplexity.evaluate_run_text(run, results, options.losses):
                shown.append(result)
                overlap = ", half" if result.overlap == "half" else ""
                line = f"{result.text}, {result.window:,}{overlap}: {result.perplexity:.3f}"
                _show_result(result, line, options, display.live)
        if options.maps:
            write_maps(run, model, stream, options.maps, device)
        if options.diagnose:
            windows = [window for window in windows if window >= diagnosis.BLOCK]
            with EvaluationDisplay("diagnosing", quiet=options.json) as display:
                rows = diagnosis.diagnose_text(
                    model, stream, windows, seed=options.seed, device=device, progress=display
                )
                diagnoses += list(diagnosis.diagnose_run(run, rows))
    if not options.json:
        Console().print(perplexity_table(shown))
    if diagnoses:
        _show_diagnoses(diagnoses, options)


def _streams(options: argparse.Namespace, task: Text) -> list[Stream]:
    """Return the texts to read, each with the run's tokenizer and a name of its own."""
    from tra.text import TokenStore
    from tra.text.task import Stream

    streams = [Stream.of_store(TokenStore.open(path)) for path in options.text] or [task.stream("valid")]
    if len({stream.name for stream in streams}) < len(streams):
        raise ValueError("two texts have the same name: rename a store's folder, or evaluate one at a time")
    for stream in streams:
        if stream.tokenizer != task.tokenizer:
            raise ValueError(f"{stream.name} has the tokenizer {stream.tokenizer!r}, the run {task.tokenizer!r}")
    return streams


def _show_result(result: Any, line: str, options: argparse.Namespace, live: bool) -> None:
    """Print a result as soon as it is there, so that an interruption loses only what is not done."""
    if options.json:
        print(json.dumps(asdict(result)), flush=True)
    elif not live:
        print(line, flush=True)


def _show_diagnoses(diagnoses: list[Diagnosis], options: argparse.Namespace) -> None:
    from rich.console import Console

    from tra.cli.display import diagnosis_table

    if options.json:
        for row in diagnoses:
            print(json.dumps(asdict(row)))
    else:
        Console().print(diagnosis_table(diagnoses))
