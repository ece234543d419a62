"""`tra calibrate`: measure how many of the newest keys each head of a run needs."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tra.cli.options import add_device, add_json
from tra.runs import STATISTICS

if TYPE_CHECKING:
    from rich.table import Table

    from tra.evaluation.calibration import Sequences
    from tra.runs import Calibration, RunFolder

DESCRIPTION = """Measure how many of the newest keys each head of a TRA run needs, so that
tra generate --memory calibrated runs in bounded memory at a known error.

For every layer and head, the smallest windows that leave out less attention
weight than the tolerance are written to windows.json in the run's folder. They
hold for text like the text that they were measured on.

  tra calibrate runs/wikitext-tra data/wikitext-103/valid
  tra calibrate runs/text-demo-tra --tolerance 0.01 --length 1024"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or flipflop-tra, a run that comes with tra")
    parser.add_argument(
        "store",
        nargs="?",
        type=Path,
        metavar="STORE",
        help="the token store to read (tra prepare); by default the run's validation text. A run of a task reads test "
        "sequences instead",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="T",
        help="largest share of the attention weight that a window may leave out (default: 0.001)",
    )
    parser.add_argument(
        "--statistic",
        choices=STATISTICS,
        default=STATISTICS[0],
        help="what must not exceed the tolerance: tail, the weight left out at all but one query in a thousand, or "
        "mean, its mean over queries; windows.json has both and uses this one (default: tail)",
    )
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="tokens of a sequence of text; windows go up to half of it (default: 4096, or less for a short text)",
    )
    parser.add_argument("--sequences", type=int, default=16, metavar="N", help="sequences to read (default: 16)")
    parser.add_argument("--split", metavar="SPLIT", help="split of a task (default: the first that is evaluated)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed that chooses the sequences (default: 0)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write (default: windows.json in the run's folder; for a run that comes with tra, in this folder)",
    )
    add_device(parser)
    add_json(parser, "print what is written, as JSON")


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tra.cli.display import EvaluationDisplay
    from tra.evaluation.calibration import calibrate, check_tolerance, check_windowed
    from tra.runs import SHIPPED, RunFolder, check_replaceable, write_windows
    from tra.training import pick_device

    check_tolerance(options.tolerance)
    device, folder = pick_device(options.device), RunFolder.open(options.run)
    check_windowed(folder.config().model.mechanism)
    is_shipped = SHIPPED in folder.path.resolve().parents  # the package's own runs are never written to
    out = options.out or (Path("windows.json") if is_shipped else folder.windows_file)
    check_replaceable(out, folder)
    sequences = _sequences(options, folder)
    with contextlib.nullcontext() if is_shipped else folder.lock():
        model = folder.load_model(device)
        with EvaluationDisplay("calibrating", quiet=options.json) as display:
            found = calibrate(
                folder,
                model,
                sequences,
                options.tolerance,
                statistic=options.statistic,
                seed=options.seed,
                progress=display,
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        write_windows(out, found)
    if options.json:
        print(json.dumps(asdict(found)))
        return 0
    Console().print(_table(found))
    for line in _summary(found):
        print(line)
    print(out)
    return 0


def _sequences(options: argparse.Namespace, folder: RunFolder) -> Sequences:
    """Return the sequences to read: pieces of a text, or test sequences of a task."""
    from tra.evaluation.calibration import task_sequences, text_sequences
    from tra.text import VOCABULARIES, TokenStore
    from tra.text.task import Stream, Text

    config = folder.config()
    task = config.task.build()
    if not isinstance(task, Text):
        if options.store is not None or options.length is not None:
            raise ValueError(f"STORE and --length are for language models; this run learnt {task.name}")
        return task_sequences(task, config.evaluate, options.split, options.sequences, options.seed)
    if options.split is not None:
        raise ValueError("--split is for tasks; this run learnt text")
    stream = task.stream("valid") if options.store is None else Stream.of_store(TokenStore.open(options.store))
    if stream.tokenizer != task.tokenizer:
        raise ValueError(f"{stream.name} has the tokenizer {stream.tokenizer!r}, the run {task.tokenizer!r}")
    known = min(config.model.vocab_size, VOCABULARIES[stream.tokenizer])
    return text_sequences(stream, known, options.length, options.sequences, options.seed)


def _table(found: Calibration) -> Table:
    """Return a table of the windows, with a row for each layer."""
    from rich.table import Table

    table = Table("layer", "tail, by head", "mean, by head", title=f"smallest windows, tolerance {found.tolerance:g}")
    for layer, both in enumerate(zip(found.tail_windows, found.mean_windows, strict=True)):
        table.add_row(str(layer), *(" ".join(map(str, heads)) for heads in both))
    return table


def _summary(found: Calibration) -> list[str]:
    """Return lines that say what was measured, what the windows cost, and which heads have none."""
    largest = max(window for heads in found.windows for window in heads)
    kept = sum(map(sum, found.windows))
    lines = [
        f"measured at {found.queries:,} queries of {found.sequences} sequences of {found.length:,} tokens "
        f"({found.text}, {found.source})",
        f"the windows by {found.statistic} are of at most {largest:,} keys, "
        f"{kept:,} in all {sum(map(len, found.windows))} heads together, however long the text",
    ]
    if found.open_heads:
        heads = ", ".join(f"{layer}.{head}" for layer, head in found.open_heads)
        lines.append(
            f"no window up to {found.length // 2:,} is enough for heads (layer.head) {heads}, which got "
            f"{found.length:,} without a known error: calibrate on longer sequences, or with a larger tolerance"
        )
    return lines
