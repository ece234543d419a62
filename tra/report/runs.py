"""The files of runs that reports read, and whether they belong together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tra.report._names import NAMES
from tra.runs import read_rows


class EvaluatedRun(NamedTuple):
    """What a report knows of a run."""

    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluation: list[dict[str, Any]]
    diagnosis: list[dict[str, Any]]
    perplexity: list[dict[str, Any]]

    @property
    def is_text(self) -> bool:
        return self.config["task"]["name"] == "text"

    @property
    def mechanism(self) -> str:
        return self.config["model"]["mechanism"]

    @property
    def seed(self) -> int:
        return self.config["train"]["seed"]


def read_run(folder: Path) -> EvaluatedRun:
    for name in ("config.json", "environment.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} can't be reported: it has no {name}")
    run = EvaluatedRun(
        json.loads((folder / "config.json").read_text()),
        json.loads((folder / "environment.json").read_text())["sessions"][-1],
        read_rows(folder / "metrics.jsonl"),
        read_rows(folder / "eval.jsonl"),
        read_rows(folder / "diagnose.jsonl"),
        read_rows(folder / "perplexity.jsonl"),
    )
    if not (run.perplexity if run.is_text else run.evaluation):
        file = "perplexity.jsonl" if run.is_text else "eval.jsonl"
        raise ValueError(f"{folder} can't be reported: it has no {file}; run tra evaluate {folder} first")
    return run


def read_runs(folders: Sequence[Path]) -> list[EvaluatedRun]:
    """Runs of one task, evaluated alike, each mechanism and seed once."""
    if not folders:
        raise ValueError("name at least one run folder")
    runs: dict[tuple[str, int], EvaluatedRun] = {}
    for folder in folders:
        run = read_run(folder)
        if (run.mechanism, run.seed) in runs:
            raise ValueError(f"two runs of {run.mechanism} with seed {run.seed}: name one of them")
        runs[run.mechanism, run.seed] = run
    found = list(runs.values())
    if len({json.dumps(run.config["task"]) for run in found}) > 1:
        raise ValueError("the runs learnt different tasks: report one task at a time")
    if len({tuple(row["split"] for row in run.evaluation) for run in found}) > 1:
        raise ValueError("the runs were evaluated on different splits: evaluate them alike first")
    return found


def in_order(runs: Sequence[EvaluatedRun]) -> list[str]:
    """Mechanisms as tables show them."""
    present = dict.fromkeys(run.mechanism for run in runs)
    return [*(name for name in NAMES if name in present), *(name for name in present if name not in NAMES)]
