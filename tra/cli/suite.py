"""`tra suite`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from tra import training
from tra.cli.options import parse_duration
from tra.suite.grid import Cell, Suite


def suite(
    action: tyro.conf.Positional[Literal["run", "status", "table", "merge"]],
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME | FOLDER ...")],
    /,
    only: tuple[str, ...] = (),
    out: Path | None = None,
    jobs: int = 1,
    budget: Annotated[str | None, tyro.conf.arg(metavar="9m")] = None,
    retry: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    engine: Literal["local", "ray"] = "local",
    pack: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    format: Literal["markdown", "csv", "json"] = "markdown",
    device: str | None = None,
) -> int:
    """Train and measure a grid of runs, and make its tables. What is done is skipped; what was cut off goes on.

    Args:
        action: "run" it; "status" of its cells; its "table" as far as it has come; or "merge" run folders, or archives
            that --pack made, of several machines into --out.
        names: A suite: paper, paper-quick (the same in miniature), rivals, rivals-rates, lengths, lengths-rates,
            language-rates, or a function of your own as FILE.py:FUNCTION. Of "merge": what to bring together.
        only: Tables and mechanisms to take; all by default.
        out: Where the runs go, a folder each; runs/<name> by default.
        jobs: Runs side by side on this machine; with Ray, runs that share a GPU.
        budget: Start only what fits, save the rest in time and end well, as in 9m.
        retry: Run those again that failed.
        engine: "ray" takes the cluster that RAY_ADDRESS names, or makes one of this machine.
        pack: Leave the results, and small weights, as one archive.
        format: Of the table.
        device: cpu or cuda; a GPU by default if there is one.
    """
    if action == "merge":
        return _suite_merge(names, out)
    if len(names) != 1:
        raise ValueError(f"suite {action} takes one suite, got {len(names)}")
    from tra.suite import suite as suite_of
    from tra.suite.grid import cells_of

    chosen = suite_of(names[0])
    cells = cells_of(chosen, only)
    kept = {cell.name for cell in cells}
    chosen = {
        name: part._replace(cells=[cell for cell in part.cells if cell.name in kept]) for name, part in chosen.items()
    }
    chosen = {name: part for name, part in chosen.items() if part.cells}
    out = Path("runs") / names[0].rpartition(":")[2] if out is None else out
    if action == "status":
        return _suite_status(cells, out)
    if action == "table":
        return _suite_table(chosen, out, format)
    training.pick_device(device)
    if engine == "ray" and budget is not None:
        raise ValueError("--budget is for this machine; Ray's tasks run to their end")
    from tra.cli.suite_view import SuiteView
    from tra.suite.archive import pack as pack_results
    from tra.suite.local import run_suite
    from tra.suite.ray_engine import run_on_ray

    seconds = None if budget is None else parse_duration(budget)
    with SuiteView(chosen, cells, out, jobs, seconds) as view:
        shared: Any = {"jobs": jobs, "device": device, "retry": retry, "progress": view, "tick": view.tick}
        if engine == "ray":
            reports = run_on_ray(cells, out, **shared)
        else:
            reports = run_suite(cells, out, budget=seconds, **shared)
    if pack is not None:
        print(f"{pack_results(out, pack)} runs packed: {pack}")
    failed = [report for report in reports if report.status == "failed"]
    for report in failed:
        print(f"{report.name} failed: {report.last_lines}", file=sys.stderr)
    done = sum(report.status in ("done", "skipped") for report in reports)
    print(f"{done} of {len(cells)} runs in {out} are done (tra suite table {names[0]})")
    return 1 if failed else 0


def _suite_status(cells: Sequence[Cell], out: Path) -> int:
    from tra.suite.state import state

    table = Table("cell", "status", "step", "last lines", box=None)
    counts: dict[str, int] = {}
    for cell in cells:
        found = state(out / cell.folder)
        counts[found.status] = counts.get(found.status, 0) + 1
        table.add_row(
            cell.name, found.status, f"{found.step:,} of {cell.config.train.steps:,}", RichText(found.last_lines)
        )
    Console().print(table)
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    return 0


def _suite_table(suite: Suite, out: Path, format: str) -> int:
    from tra.suite import table

    entries = table.table(suite, out)
    text = {"markdown": lambda: table.as_markdown(entries, suite), "csv": lambda: table.as_csv(entries)}
    print(text.get(format, lambda: table.as_json(entries))(), end="")
    return 0


def _suite_merge(names: Sequence[str], out: Path | None) -> int:
    from tra.suite.archive import merge

    if out is None or not names:
        raise ValueError("suite merge takes folders or archives, and --out where they go together")
    merged = merge([Path(name) for name in names], out)
    for warning in merged.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for conflict in merged.conflicts:
        print(f"conflict: {conflict}", file=sys.stderr)
    print(
        f"{len(merged.taken)} runs taken into {out}, {len(merged.present)} were there, {len(merged.conflicts)} differ"
    )
    return 1 if merged.conflicts else 0
