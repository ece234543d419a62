"""A folder's README.md and figures from evaluated runs: what came out, and what it depends on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tra.report.exact_match import draw_exact_match
from tra.report.training import draw_training
from tra.rows import exact_text, length_text, read_rows


class EvaluatedRun(NamedTuple):
    """The files of a run that a report reads."""

    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluation: list[dict[str, Any]]


def read_run(folder: Path) -> EvaluatedRun:
    files = {name: folder / name for name in ("config.json", "environment.json", "metrics.jsonl", "eval.jsonl")}
    for file in files.values():
        if not file.is_file():
            hint = f"; run tra evaluate {folder} first" if file.name == "eval.jsonl" else ""
            raise ValueError(f"{folder} can't be reported: it has no {file.name}{hint}")
    return EvaluatedRun(
        json.loads(files["config.json"].read_text()),
        json.loads(files["environment.json"].read_text())["sessions"][-1],
        read_rows(files["metrics.jsonl"]),
        read_rows(files["eval.jsonl"]),
    )


def write_summary(folders: Sequence[Path], out: Path) -> list[Path]:
    """README.md, exact-match.png and training.png of runs of one task, one run per mechanism."""
    if not folders:
        raise ValueError("name at least one run folder")
    runs: dict[str, EvaluatedRun] = {}
    for folder in folders:
        run = read_run(folder)
        mechanism = run.config["model"]["mechanism"]
        if mechanism in runs:
            raise ValueError(f"two runs of {mechanism}: name one per mechanism")
        runs[mechanism] = run
    if len({json.dumps(run.config["task"]) for run in runs.values()}) > 1:
        raise ValueError("the runs learnt different tasks: report one task at a time")
    if len({tuple(row["split"] for row in run.evaluation) for run in runs.values()}) > 1:
        raise ValueError("the runs were evaluated on different splits: evaluate them alike first")
    out.mkdir(parents=True, exist_ok=True)
    readme, exact, training = out / "README.md", out / "exact-match.png", out / "training.png"
    readme.write_text(summary_text(runs))
    first = next(iter(runs.values()))
    title = f"{first.config['task']['name']}, {first.metrics[-1]['step']:,} training steps"
    draw_exact_match({name: run.evaluation for name, run in runs.items()}, exact, title=title)
    draw_training({name: run.metrics for name, run in runs.items()}, training)
    return [readme, exact, training]


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
        "",
        "![training loss](training.png)",
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
