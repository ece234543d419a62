"""Make the tables of a suite from the cells that are done: mean, spread, number of seeds, the best and the worst."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tra.runs import RunFolder, read_rows, variant_of
from tra.suite.grid import Cell, Measure, Part, Suite
from tra.suite.state import is_done

SOLVED = 0.99
"""Exact match on the training distribution from which a task counts as solved."""


@dataclass(frozen=True)
class Entry:
    """One number of a table, over seeds."""

    part: str
    row: str
    column: str
    mean: float
    deviation: float | None
    """Standard deviation over seeds, with n - 1; None for one seed."""
    seeds: int
    best: float
    worst: float


def table(suite: Suite, out: Path, is_finished: Callable[[Path], bool] = is_done) -> list[Entry]:
    """Return all entries, from the cells that are done."""
    return [entry for name, part in suite.items() for entry in _entries(name, part, out, is_finished)]


def _entries(name: str, part: Part, out: Path, is_finished: Callable[[Path], bool]) -> list[Entry]:
    values: dict[tuple[str, str], list[float]] = {}
    for cell in part.cells:
        folder = out / cell.folder
        if is_finished(folder):
            for column, value in _measurements(part, cell, RunFolder(folder)).items():
                values.setdefault((row_of(cell), column), []).append(value)
    best, worst = (max, min) if part.measure in ("exact", "solved") else (min, max)
    entries = []
    for (row, column), found in values.items():
        deviation = statistics.stdev(found) if len(found) > 1 else None
        mean = statistics.fmean(found)
        entries.append(Entry(name, row, column, mean, deviation, len(found), best(found), worst(found)))
    return entries + (_ratios(name, values) if part.measure == "cost" else [])


def row_of(cell: Cell) -> str:
    """Return the row of a cell."""
    return cell.row or variant_of(asdict(cell.config.model))


def _measurements(part: Part, cell: Cell, run: RunFolder) -> dict[str, float]:
    """Return the values of a cell by column."""
    if part.measure == "exact":
        return {row["split"]: row["exact"] for row in read_rows(run.evaluation_file, ("split", "exact"))}
    if part.measure == "perplexity":
        return {
            f"{row['text']}, {row['window']:,}": row["perplexity"]
            for row in read_rows(run.perplexity_file, ("text", "window", "perplexity"))
        }
    if part.measure == "rate":
        return {f"{cell.config.optim.lr:g}": final_loss(run)}
    if part.measure == "solved":
        rows = read_rows(run.evaluation_file, ("split", "exact"))
        return {f"{cell.config.optim.lr:g}": float(rows[0]["exact"] >= SOLVED)}
    rows = read_rows(run.metrics_file)
    size = cell.config.train.batch_size * cell.config.task.build().size("train")
    speeds = [row["tokens_per_second"] for row in rows[1:] or rows]  # the first line includes compilation
    return {"ms a step": 1e3 * size / statistics.median(speeds)}


def final_loss(run: RunFolder) -> float:
    """Return the training loss of a run: the mean over the last tenth of its log, at least one line."""
    losses = [row["loss"] for row in read_rows(run.metrics_file, ("loss",))]
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def best_rates(entries: Sequence[Entry], part: str) -> dict[str, tuple[float, bool]]:
    """Return, for each row, the learning rate with the lowest mean final loss, and whether it is at an edge."""
    found: dict[str, dict[float, float]] = {}
    for entry in entries:
        if entry.part == part:
            found.setdefault(entry.row, {})[float(entry.column)] = entry.mean
    best = {row: min(losses, key=losses.__getitem__) for row, losses in found.items()}
    return {row: (rate, rate in (min(found[row]), max(found[row]))) for row, rate in best.items()}


def _ratios(name: str, values: dict[tuple[str, str], list[float]]) -> list[Entry]:
    """Return entries of each row divided by RoPE's of the same size."""
    found = []
    for (row, column), own in values.items():
        size, _, _ = row.rpartition(", ")
        rope = values.get((f"{size}, rope", column))
        if rope:
            ratio = statistics.fmean(own) / statistics.fmean(rope)
            found.append(Entry(name, row, "over RoPE's", ratio, None, len(own), ratio, ratio))
    return found


def as_markdown(entries: Sequence[Entry], suite: Suite) -> str:
    """Return a table per part: `mean ± deviation (worst …)`, or the mean alone where seeds don't differ."""
    lines: list[str] = []
    for name, part in suite.items():
        of_part = [entry for entry in entries if entry.part == name]
        rows = {
            row_of(cell): len({c.config.train.seed for c in part.cells if row_of(c) == row_of(cell)})
            for cell in part.cells
        }
        columns = list(dict.fromkeys(entry.column for entry in of_part))
        if part.measure in ("rate", "solved"):
            columns.sort(key=float)
        done = len({entry.row for entry in of_part})
        lines += [f"## {name}", "", *([part.note, ""] if part.note else [])]
        if done < len(rows):
            lines += [f"{done} of {len(rows)} rows so far.", ""]
        if not of_part:
            continue
        lines += ["| | seeds | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
        by_position = {(entry.row, entry.column): entry for entry in of_part}
        for row in (row for row in rows if any(entry.row == row for entry in of_part)):
            in_row = [by_position.get((row, column)) for column in columns]
            seeds = max(entry.seeds for entry in in_row if entry)
            cells = ["" if entry is None else _text(entry, part.measure) for entry in in_row]
            lines.append(f"| {row} | {seeds} of {rows[row]} | " + " | ".join(cells) + " |")
        if part.measure == "rate":
            lines += ["", *_rate_lines(best_rates(entries, name))]
        if part.measure == "solved":
            lines += ["", f"Seeds whose exact match on the training distribution is at least {SOLVED}, of all seeds."]
        lines.append("")
    return "\n".join(lines).strip() + "\n"


def _rate_lines(best: dict[str, tuple[float, bool]]) -> list[str]:
    """Return lines with the best rates, and with the rows that need a wider search."""
    edges = [row for row, (_, at_edge) in best.items() if at_edge]
    lines = [
        "Training loss, mean of the last tenth. Best rates: " + ", ".join(f"{r} {x:g}" for r, (x, _) in best.items())
    ]
    lines[0] += "."
    if edges:
        lines += ["", f"Best at an edge, so that a wider search may find better ones: {', '.join(edges)}."]
    return lines


def _text(entry: Entry, measure: Measure) -> str:
    if measure == "solved":
        return f"{round(entry.mean * entry.seeds)} of {entry.seeds}"
    if entry.deviation is None or entry.best == entry.worst:
        return f"{entry.mean:.4g}"
    return f"{entry.mean:.4g} ± {entry.deviation:.2g} (worst {entry.worst:.4g})"


def as_csv(entries: Sequence[Entry]) -> str:
    """Return a line per entry."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Entry.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(entry) for entry in entries)
    return text.getvalue()


def as_json(entries: Sequence[Entry]) -> str:
    """Return a list of objects, one per entry."""
    rows: list[dict[str, Any]] = [asdict(entry) for entry in entries]
    return json.dumps(rows, indent=2) + "\n"
