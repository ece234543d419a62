"""`tra suite`: train and measure a grid of runs, and make its tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tra.cli.options import add_device, add_list, parse_duration

if TYPE_CHECKING:
    from tra.suite.grid import Cell, Suite

DESCRIPTION = """Train and measure a grid of runs, and make its tables. Finished runs are
skipped; interrupted ones are resumed.

  run     train and measure every run of a suite
  status  show how far every run is
  table   make the tables, as far as runs are finished
  merge   bring run folders of several machines, or archives made with --pack,
          together in --out

suites:
  paper, paper-quick      the paper's five tables; the same in miniature
  paper-rates             learning rates of TRA, RoPE, CoPE and FoT for these
  rivals, rivals-rates    every mechanism on a small task; its learning rates
  lengths, lengths-rates  copy, induct and instruct; their learning rates
  language-rates          learning rates of language models
  margin-rates            TRA at six margins and three learning rates
  trainability            how many of ten seeds learn the demo's task, by rate
  FILE.py:FUNCTION        your own: a function that returns a suite

  tra suite run rivals --jobs 2
  tra suite run paper --only flipflop tra rope --budget 9m
  tra suite table rivals"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("run", "status", "table", "merge"), metavar="ACTION", help="see above")
    parser.add_argument(
        "names",
        nargs="*",
        default=[],
        metavar="NAME",
        help="a suite, see above; with merge: run folders or archives",
    )
    add_list(parser, "--only", "NAME", "tables and mechanisms to take, also FILE.py:NAME of your own (default: all)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the runs go, a folder each (default: runs/<suite>)"
    )
    parser.add_argument(
        "--format", choices=("markdown", "csv", "json"), default="markdown", help="of the table (default: markdown)"
    )

    run = parser.add_argument_group("options of run")
    run.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time here; with Ray, runs on a GPU (default: 1)"
    )
    run.add_argument(
        "--budget", metavar="9m", help="end within this time: start only runs that fit, save the others in time"
    )
    run.add_argument("--retry", action="store_true", help="run failed runs again")
    run.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray uses the cluster that RAY_ADDRESS names, or starts one on this machine (default: local)",
    )
    run.add_argument("--pack", type=Path, metavar="FILE", help="also save results and small weights as one archive")
    add_device(run)


def run(options: argparse.Namespace) -> int:
    if options.action == "merge":
        return _merge(options)
    if len(options.names) != 1:
        raise ValueError(f"suite {options.action} takes one suite, got {len(options.names)}")
    from tra.runs.extensions import without_folder
    from tra.suite import suite
    from tra.suite.grid import cells_of

    name = options.names[0]
    grid = suite(name)
    cells = cells_of(grid, map(without_folder, options.only))
    chosen = {cell.name for cell in cells}
    parts = {
        title: part._replace(cells=[cell for cell in part.cells if cell.name in chosen]) for title, part in grid.items()
    }
    parts = {title: part for title, part in parts.items() if part.cells}
    out = options.out or Path("runs") / name.rpartition(":")[2]
    if options.action == "status":
        return _show_status(cells, out)
    if options.action == "table":
        return _print_table(parts, out, options.format)
    return _run(options, parts, cells, out)


def _run(options: argparse.Namespace, parts: Suite, cells: list[Cell], out: Path) -> int:
    from tra.cli.suite_view import SuiteView
    from tra.suite.archive import check_pack_target, pack
    from tra.suite.local import run_suite
    from tra.suite.ray_engine import run_on_ray
    from tra.training import pick_device

    if options.pack is not None:
        check_pack_target(options.pack)
    pick_device(options.device)  # fails now rather than in every run
    if options.engine == "ray" and options.budget is not None:
        raise ValueError("--budget is for this machine; Ray's tasks run to their end")
    budget = None if options.budget is None else parse_duration(options.budget)
    with SuiteView(parts, cells, out, options.jobs, budget) as view:
        settings: dict[str, Any] = {"jobs": options.jobs, "device": options.device, "retry": options.retry}
        settings |= {"progress": view, "tick": view.tick}
        if options.engine == "ray":
            reports = run_on_ray(cells, out, **settings)
        else:
            reports = run_suite(cells, out, budget=budget, **settings)
    if options.pack is not None:
        print(f"{pack(out, options.pack)} runs packed: {options.pack}")
    failed = [report for report in reports if report.status == "failed"]
    for report in failed:
        print(f"{report.name} failed: {report.last_lines}", file=sys.stderr)
    for note in dict.fromkeys(part.note for part in parts.values() if part.note):
        print(f"note: {note}")
    done = sum(report.status in ("done", "skipped") for report in reports)
    print(f"{done} of {len(cells)} runs in {out} are done (tra suite table {options.names[0]})")
    return 1 if failed else 0


def _show_status(cells: list[Cell], out: Path) -> int:
    from collections import Counter

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tra.suite.state import state

    table = Table("run", "status", "step", "last lines", box=None)
    counts: Counter[str] = Counter()
    for cell in cells:
        found = state(out / cell.folder)
        counts[found.status] += 1
        steps = f"{found.step:,} of {cell.config.train.steps:,}"
        table.add_row(cell.name, found.status, steps, Text(found.last_lines))
    Console().print(table)
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    return 0


def _print_table(parts: Suite, out: Path, format: str) -> int:
    from tra.suite import table

    entries = table.table(parts, out)
    if format == "markdown":
        print(table.as_markdown(entries, parts), end="")
    else:
        print(table.as_csv(entries) if format == "csv" else table.as_json(entries), end="")
    return 0


def _merge(options: argparse.Namespace) -> int:
    from tra.suite.archive import merge

    if options.out is None or not options.names:
        raise ValueError("suite merge takes folders or archives, and --out where they go together")
    merged = merge([Path(name) for name in options.names], options.out)
    for kind, lines in (("warning", merged.warnings), ("conflict", merged.conflicts)):
        for line in lines:
            print(f"{kind}: {line}", file=sys.stderr)
    taken, present, differing = map(len, (merged.taken, merged.present, merged.conflicts))
    print(f"{taken} runs taken into {options.out}, {present} were there, {differing} differ")
    return 1 if merged.conflicts else 0
