"""A folder's README.md from runs of many mechanisms and several seeds: exact match, and the two failures beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tra.report._markdown import table_header, table_row
from tra.report._names import FAILURES, NAMES
from tra.report.figures import links, write_figures
from tra.report.runs import EvaluatedRun
from tra.runs import length_text, mean_over_heads


def write_comparison(runs: Sequence[EvaluatedRun], out: Path) -> list[Path]:
    """README.md and figures; what stands in notes.md beside it is taken in."""
    out.mkdir(parents=True, exist_ok=True)
    readme, notes = out / "README.md", out / "notes.md"
    readme.write_text(comparison_text(runs, notes.read_text() if notes.is_file() else ""))
    return [readme, *write_figures(runs, out)]


def comparison_text(runs: Sequence[EvaluatedRun], notes: str = "") -> str:
    """Markdown: exact match, what the runs' attention does by length, notes, and how to make it again."""
    order = [*NAMES, *(run.mechanism for run in runs)]
    groups: dict[str, list[EvaluatedRun]] = {}
    for run in sorted(runs, key=lambda run: (order.index(run.mechanism), run.seed)):
        groups.setdefault(run.mechanism, []).append(run)
    _check(groups)
    first = runs[0]
    splits = [row["split"] for row in first.evaluation]
    lengths = [f"{row['split']} ({length_text(row)})" for row in first.evaluation]
    seeds = sorted({run.seed for run in runs})
    lines = [
        f"# {first.config['task']['name']}: every mechanism",
        "",
        f"Sequences without an error, mean of {len(seeds)} seeds, with the worst and the best where they differ. "
        f"{first.metrics[-1]['step']:,} steps, batch {first.config['train']['batch_size']}, "
        f"{first.config['model']['n_layers']} layers, {first.config['model']['n_heads']} heads, "
        f"width {first.config['model']['d_model']}.",
        "",
        *table_header("mechanism", ["lr", *lengths]),
    ]
    for mechanism, group in groups.items():
        cells = [
            _spread([row["exact"] for run in group for row in run.evaluation if row["split"] == split])
            for split in splits
        ]
        lines.append(table_row(_name(mechanism), [f"{group[0].config['optim']['lr']:g}", *cells]))
    lines += links(runs, "exact-by-length.png")
    if notes:
        lines += ["", notes.strip()]
    lines += ["", "## The two failures", "", "Means over layers, heads and seeds, at queries where an answer is due."]
    lines += links(runs, "failures.png")
    for measure, title in FAILURES.items():
        if not any(row.get(measure) for run in runs for row in run.diagnosis):
            continue
        lines += ["", f"{title[0].upper()}{title[1:]} (`{measure}`):", "", *table_header("mechanism", lengths)]
        for mechanism, group in groups.items():
            cells = _measures(group, measure, splits, lambda x: f"{x:.3f}")
            if any(cells):
                lines.append(table_row(_name(mechanism), cells))
    lines += [
        "",
        "Keys kept, null rows, gate (log σ) and reach (tokens back until the rest provably doesn't count):",
        "",
    ]
    lines += table_header("mechanism", lengths)
    for mechanism, group in groups.items():
        parts = [
            _measures(group, "kept", splits, lambda x: f"kept {x:.3f}"),
            _measures(group, "null", splits, lambda x: f"null {x:.3f}"),
            _measures(group, "log_forget", splits, lambda x: f"gate {x:.2f}"),
            _measures(group, "reach", splits, lambda x: f"reach {x:.0f}"),
        ]
        cells = [", ".join(part for part in column if part) for column in zip(*parts, strict=True)]
        if any(cells):
            lines.append(table_row(_name(mechanism), cells))
    lines += links(runs, "heads.png", "kept.png")
    lines += ["", "## Training", *links(runs, "training.png")]
    lines += [
        "",
        "## Made by",
        "",
        f"`{_command(first)}` on {first.environment['device']}, torch {first.environment['torch']}, "
        f"commit {', '.join(sorted({str(run.environment['commit']) for run in runs}))}. Every run's config, "
        "environment, metrics, evaluation and diagnosis lie in its folder; `tra report` made this page from them.",
        "",
    ]
    return "\n".join(lines)


def _check(groups: dict[str, list[EvaluatedRun]]) -> None:
    """One table compares like with like."""
    if len({tuple(run.seed for run in group) for group in groups.values()}) > 1:
        raise ValueError("a comparison needs the same seeds of every mechanism")
    for mechanism, group in groups.items():
        if len({run.config["optim"]["lr"] for run in group}) > 1:
            raise ValueError(f"the runs of {mechanism} have different learning rates: compare one at a time")
    runs = [run for group in groups.values() for run in group]
    for what, values in (
        ("steps", {run.metrics[-1]["step"] for run in runs}),
        ("test sequences", {tuple((row["examples"], row["seed"]) for row in run.evaluation) for run in runs}),
    ):
        if len(values) > 1:
            raise ValueError(f"the runs have different {what}: make them alike first")


def _command(run: EvaluatedRun) -> str:
    return "tra " + " ".join(run.environment["arguments"])


def _name(mechanism: str) -> str:
    return NAMES.get(mechanism, mechanism)


def _spread(values: Sequence[float]) -> str:
    """Mean, and the range where there is one."""
    mean, low, high = sum(values) / len(values), min(values), max(values)
    return f"{mean:.3f}" if low == high else f"{mean:.3f} ({low:.3f}-{high:.3f})"


def _measures(
    group: Sequence[EvaluatedRun], name: str, splits: Sequence[str], text: Callable[[float], str]
) -> list[str]:
    """Of every split the mean over seeds, heads and layers; empty where the mechanism doesn't have it."""
    cells = []
    for split in splits:
        rows: list[dict[str, Any]] = [row for run in group for row in run.diagnosis if row["split"] == split]
        values = [value for row in rows if (value := mean_over_heads(row.get(name))) is not None]
        cells.append(text(sum(values) / len(values)) if values else "")
    return cells
