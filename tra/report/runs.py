"""Read run folders, whole or in part, and check whether they can stand in one table.

There is one reader. It reports what it could not read; tables refuse such runs, and the page shows the rest of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tra.report.names import table_order
from tra.runs import RunFolder, is_finite, row_problem, variant_of

Row = dict[str, Any]

TABLE_FACTS = ("train.batch_size", "optim.lr", "model.n_layers", "model.n_heads", "model.d_model")
"""Numbers of a config that tables show."""


class Problem(NamedTuple):
    """A run, or a part of one, that can't be read."""

    run: str
    why: str
    whole: bool


@dataclass(frozen=True, eq=False)
class EvaluatedRun:
    """The files of an evaluated run, as reports read them."""

    config: dict[str, Any]
    sessions: list[dict[str, Any]]
    metrics: list[Row]
    evaluation: list[Row]
    diagnosis: list[Row] = field(default_factory=list)
    perplexity: list[Row] = field(default_factory=list)
    name: str = ""

    @property
    def task(self) -> str:
        return self.config["task"]["name"]

    @property
    def mechanism(self) -> str:
        return self.config["model"]["mechanism"]

    @property
    def variant(self) -> str:
        """The mechanism, with its threshold and margin if these are not 0. Variants are what is compared."""
        return variant_of(self.config["model"])

    @property
    def code(self) -> str:
        """The user's files that the run was trained with, such as `mine.py 01234567`; empty for built-in names."""
        return ", ".join(
            f"{source} {version[:8]}" for source, version in sorted(self.config.get("imports", {}).items())
        )

    @property
    def seed(self) -> int:
        return self.config["train"]["seed"]

    @property
    def is_text(self) -> bool:
        return self.task == "text"

    @property
    def trained_length(self) -> int | None:
        """The longest training sequence, in the task's own count; None where it isn't known."""
        from tra.tasks import TASKS  # only here, as it imports torch
        from tra.text.task import Text

        try:
            task = (TASKS | {"text": Text})[self.task](**self.config["task"]["arguments"])
            return task.lengths("train").longest
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def environment(self) -> dict[str, Any]:
        """The last session: a resumed run has several."""
        return self.sessions[-1]

    @property
    def command(self) -> str:
        return "tra " + " ".join(self.environment["arguments"])


def load_runs(folders: Sequence[Path]) -> tuple[list[EvaluatedRun], list[Problem]]:
    """Return every run that has results, and what could not be read."""
    if not folders:
        raise ValueError("name at least one run folder")
    runs: list[EvaluatedRun] = []
    problems: list[Problem] = []
    known: set[Path] = set()
    for folder in folders:
        if folder.resolve() in known:
            problems.append(Problem(str(folder), "is named twice", whole=True))
            continue
        known.add(folder.resolve())
        try:
            run, notes = _load(folder)
            if not run.evaluation and not run.perplexity:
                raise ValueError("; ".join([f"has no results: run tra evaluate {folder} first", *notes.values()]))
        except (ValueError, OSError) as error:
            problems.append(Problem(str(folder), one_line(error), whole=True))
            continue
        runs.append(run)
        problems += [Problem(str(folder), note, whole=False) for note in notes.values()]
    return runs, problems


def read_run(folder: Path) -> EvaluatedRun:
    """Return a run that has all that a table needs. A ValueError says what it lacks."""
    try:
        run, notes = _load(folder)
    except ValueError as error:
        what = "" if folder.exists() else ", so it has no config.json"
        raise ValueError(f"{folder} can't be reported: {error}{what}") from None
    _check_facts(run)
    results = "perplexity.jsonl" if run.is_text else "eval.jsonl"
    if not (run.perplexity if run.is_text else run.evaluation):
        raise ValueError(f"{folder} can't be reported: it has no {results}; run tra evaluate {folder} first")
    if run.metrics:  # of damaged lines, as a killed run has one at the end, the others are enough
        notes.pop("metrics.jsonl", None)
    if notes:
        raise ValueError(f"{folder} can't be reported: {'; '.join(notes.values())}")
    return run


def read_runs(folders: Sequence[Path]) -> list[EvaluatedRun]:
    """Return runs of one task, evaluated alike, each variant and seed once. A ValueError where they aren't."""
    if not folders:
        raise ValueError("name at least one run folder")
    runs: dict[tuple[str, int], EvaluatedRun] = {}
    for folder in folders:
        run = read_run(folder)
        if (run.variant, run.seed) in runs:
            raise ValueError(f"two runs of {run.variant} with seed {run.seed}: name one of them")
        runs[run.variant, run.seed] = run
    found = list(runs.values())
    if len({json.dumps(run.config["task"]) for run in found}) > 1:
        raise ValueError("the runs learnt different tasks: report one task at a time")
    if len({tuple(row["split"] for row in run.evaluation) for run in found}) > 1:
        raise ValueError("the runs were evaluated on different splits: evaluate them alike first")
    return found


def by_variant(runs: Sequence[EvaluatedRun]) -> dict[str, list[EvaluatedRun]]:
    """Return the runs of each variant by rising seed, variants in the order of tables."""
    found: dict[str, list[EvaluatedRun]] = {variant: [] for variant in table_order(run.variant for run in runs)}
    for run in sorted(runs, key=lambda run: run.seed):
        found[run.variant].append(run)
    return found


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _load(folder: Path) -> tuple[EvaluatedRun, dict[str, str]]:
    """Return a run, and by file what could not be read of it. A ValueError where there is no config to go by."""
    if not folder.is_dir():
        raise ValueError("is not a folder" if folder.exists() else "doesn't exist")
    files = RunFolder(folder)
    config = _read_json(files.config_file)
    _check_config(config)
    notes: dict[str, str] = {}
    sessions: list[dict[str, Any]] = []
    try:
        environment = _read_json(files.environment_file)
        listed = environment.get("sessions") if isinstance(environment, dict) else None
        sessions = [session for session in listed if isinstance(session, dict)] if isinstance(listed, list) else []
        if not sessions:
            notes["environment.json"] = "environment.json names no session"
    except ValueError as error:
        notes["environment.json"] = str(error)
    run = EvaluatedRun(
        config,
        sessions,
        metrics=_read_rows(files.metrics_file, notes),
        evaluation=_read_rows(files.evaluation_file, notes),
        diagnosis=_read_rows(files.diagnosis_file, notes),
        perplexity=_read_rows(files.perplexity_file, notes),
        name=str(folder),
    )
    if not run.metrics:
        notes.setdefault("metrics.jsonl", "has no metrics.jsonl, so no training curve")
    return run, notes


def _read_json(file: Path) -> Any:
    if not file.is_file():
        raise ValueError(f"has no {file.name}")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is damaged: {one_line(error)}") from None


def _check_config(config: Any) -> None:
    """Check as much of a config as reports rely on."""
    for section, key, kind in (("task", "name", str), ("model", "mechanism", str), ("train", "seed", int)):
        part = config.get(section) if isinstance(config, dict) else None
        if not isinstance(part, dict) or not isinstance(part.get(key), kind):
            raise ValueError(f"config.json is damaged: no {section}.{key}")
    for key in ("threshold", "margin"):  # missing from configs of former versions
        value = config["model"].get(key, 0)
        if not is_finite(value) and (key, value) != ("margin", "inf"):
            raise ValueError(f"config.json is damaged: model.{key} is not a number")
    imports = config.setdefault("imports", {})
    if not isinstance(imports, dict) or not all(isinstance(version, str) for version in imports.values()):
        raise ValueError("config.json is damaged: imports is not an object of digests")
    for section in ("task", "model"):
        if not isinstance(config[section].setdefault("arguments", {}), dict):
            raise ValueError(f"config.json is damaged: {section}.arguments is not an object")


def _check_facts(run: EvaluatedRun) -> None:
    """Check what tables show of a run's config and of its last session."""
    for dotted in TABLE_FACTS:
        section, _, key = dotted.partition(".")
        part = run.config.get(section)
        if not isinstance(part, dict) or not is_finite(part.get(key)):
            raise ValueError(f"{run.name} can't be reported: config.json is damaged: no {dotted}")
    if not run.sessions:
        return
    arguments = run.environment.get("arguments")
    if not isinstance(arguments, list) or not all(isinstance(argument, str) for argument in arguments):
        raise ValueError(f"{run.name} can't be reported: environment.json is damaged: no arguments")
    for key in ("device", "torch", "commit"):
        if key not in run.environment:
            raise ValueError(f"{run.name} can't be reported: environment.json is damaged: no {key}")


def _read_rows(file: Path, notes: dict[str, str]) -> list[Row]:
    """Return the lines that can be read, and note how many can't."""
    if not file.is_file():
        return []
    lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]
    rows = [row for line in lines if (row := _read_row(line, file.name)) is not None]
    if len(rows) < len(lines):
        notes[file.name] = f"{len(lines) - len(rows)} of {len(lines)} lines of {file.name} are damaged and left out"
    return rows


def _read_row(line: bytes, file: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if row_problem(file, row) is None else None
