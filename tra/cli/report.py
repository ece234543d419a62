"""`tra report`: make tables, figures or a page of evaluated runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DESCRIPTION = """Make tables and figures of evaluated runs of one task: one run of each
mechanism, or several seeds. With --out NAME.html, make one page instead, of
runs of any tasks: curves, tables and attention maps to look into.

  tra report runs/flipflop-tra runs/flipflop-rope
  tra report runs/*/ --out report.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", type=Path, default=[], metavar="RUN", help="run folders, each evaluated (tra evaluate)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report"),
        metavar="FOLDER",
        help="where README.md and the figures go (default: report); a notes.md there becomes part of a comparison. "
        "A name that ends in .html is the page; attend.npz of a run (tra attend) becomes maps on it",
    )
    parser.add_argument(
        "--index",
        type=Path,
        metavar="FOLDER",
        help="write README.md of a folder of reports instead: a line for each report that its index.json describes",
    )


def run(options: argparse.Namespace) -> int:
    if options.index is not None:
        return _write_index(options)
    if options.out.suffix.lower() in (".html", ".htm"):
        return _write_page(options)
    from tra.report.comparison import write_comparison
    from tra.report.language import write_language
    from tra.report.runs import read_runs
    from tra.report.summary import write_summary

    runs = read_runs(options.runs)
    has_several_seeds = len({run.variant for run in runs}) < len(runs)
    write = write_language if runs[0].is_text else write_comparison if has_several_seeds else write_summary
    for path in write(runs, options.out):
        print(path)
    return 0


def _write_index(options: argparse.Namespace) -> int:
    from tra.report.index import write_index

    if options.runs:
        raise ValueError("give either runs or --index")
    print(write_index(options.index))
    return 0


def _write_page(options: argparse.Namespace) -> int:
    from tra.report.page import write_page

    for problem in write_page(options.runs, options.out):
        print(f"{problem.run} {problem.why}", file=sys.stderr)
    print(options.out)
    return 0
