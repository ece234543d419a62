"""A folder's README.md and figures from evaluated runs: what came out, and what it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tra.report.exact_match import draw_exact_match
from tra.report.figures import links, write_figures
from tra.report.runs import EvaluatedRun
from tra.runs import exact_text, length_text


def write_summary(runs_read: Sequence[EvaluatedRun], out: Path) -> list[Path]:
    """README.md and figures of runs of one task, one run per mechanism."""
    runs = {run.mechanism: run for run in runs_read}
    out.mkdir(parents=True, exist_ok=True)
    readme, exact = out / "README.md", out / "exact-match.png"
    readme.write_text(summary_text(runs))
    first = next(iter(runs.values()))
    title = f"{first.config['task']['name']}, {first.metrics[-1]['step']:,} training steps"
    draw_exact_match({name: run.evaluation for name, run in runs.items()}, exact, title=title)
    return [readme, exact, *write_figures(runs_read, out)]


def summary_text(runs: dict[str, EvaluatedRun]) -> str:
    """Markdown: exact match per split and mechanism, then the facts of each run."""
    first = next(iter(runs.values()))
    task = first.config["task"]["name"]
    lines = [
        f"# {task}: exact match",
        "",
        "Sequences without an error, of all test sequences, with the 95 % Wilson interval. One training seed each.",
        "",
        "| split | length | sequences | " + " | ".join(runs) + " |",
        "|---|---|---|" + "---|" * len(runs),
    ]
    for index, row in enumerate(first.evaluation):
        cells = " | ".join(exact_text(run.evaluation[index]) for run in runs.values())
        lines.append(f"| {row['split']} | {length_text(row)} | {row['examples']:,} | {cells} |")
    lines += [
        "",
        "![exact match](exact-match.png)",
        *links(list(runs.values())),
        "",
        "| run | " + " | ".join(runs) + " |",
        "|---|" + "---|" * len(runs),
    ]
    for name, fact in _facts(runs):
        lines.append(f"| {name} | " + " | ".join(fact) + " |")
    lines += [
        "",
        "Config, environment, metrics and evaluation of a run lie in its folder; `tra report` made this page.",
        "",
    ]
    return "\n".join(lines)


def _facts(runs: dict[str, EvaluatedRun]) -> list[tuple[str, list[str]]]:
    def each(of: Any) -> list[str]:
        return [str(of(run)) for run in runs.values()]

    return [
        ("steps", each(lambda run: f"{run.metrics[-1]['step']:,}")),
        ("batch", each(lambda run: run.config["train"]["batch_size"])),
        ("seed", each(lambda run: run.config["train"]["seed"])),
        ("learning rate", each(lambda run: run.config["optim"]["lr"])),
        ("final loss", each(lambda run: f"{run.metrics[-1]['loss']:.2g}")),
        ("evaluated in", each(lambda run: run.evaluation[0]["precision"])),
        ("device", each(lambda run: run.environment["device"])),
        ("torch", each(lambda run: run.environment["torch"])),
        ("commit", each(lambda run: run.environment["commit"])),
        ("command", each(lambda run: "`tra " + " ".join(run.environment["arguments"]) + "`")),
    ]
