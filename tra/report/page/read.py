"""Run folders as they are: whole, in part, or not at all. What can't be read becomes a line that says why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tra.runs import AttentionMaps, read_attention

Row = dict[str, Any]
NUMBERS = {
    "metrics.jsonl": ("step", "loss"),
    "eval.jsonl": ("shortest", "longest", "examples", "exact", "low", "high"),
    "diagnose.jsonl": ("shortest", "longest"),
    "perplexity.jsonl": ("window", "loss", "perplexity"),
}
"""What a row must have to be shown."""

TEXTS = {"metrics.jsonl": (), "eval.jsonl": ("split",), "diagnose.jsonl": ("split",)} | {
    "perplexity.jsonl": ("text", "overlap")
}


class Problem(NamedTuple):
    """A run, or a part of one, that isn't on the page."""

    run: str
    why: str
    whole: bool


class PageRun(NamedTuple):
    """What the page knows of a run."""

    name: str
    config: dict[str, Any]
    sessions: list[dict[str, Any]]
    metrics: list[Row]
    evaluation: list[Row]
    diagnosis: list[Row]
    perplexity: list[Row]
    maps: AttentionMaps | None

    @property
    def mechanism(self) -> str:
        return self.config["model"]["mechanism"]

    @property
    def seed(self) -> int:
        return self.config["train"]["seed"]


def read_page_runs(folders: Sequence[Path]) -> tuple[list[PageRun], list[Problem]]:
    """Every run that has results, and what is wrong with the others."""
    runs: list[PageRun] = []
    problems: list[Problem] = []
    seen: dict[Path, str] = {}
    for folder in folders:
        if folder.resolve() in seen:
            problems.append(Problem(str(folder), "is named twice", whole=True))
            continue
        seen[folder.resolve()] = str(folder)
        try:
            run, notes = _read(folder)
        except (ValueError, OSError) as error:
            problems.append(Problem(str(folder), _one_line(error), whole=True))
            continue
        runs.append(run)
        problems += [Problem(str(folder), note, whole=False) for note in notes]
    return runs, problems


def _read(folder: Path) -> tuple[PageRun, list[str]]:
    if not folder.is_dir():
        raise ValueError("is not a folder" if folder.exists() else "doesn't exist")
    notes: list[str] = []
    config = _json(folder / "config.json")
    _check(config)
    sessions: list[dict[str, Any]] = []
    try:
        found = _json(folder / "environment.json")
        listed = found.get("sessions") if isinstance(found, dict) else None
        sessions = [session for session in listed or [] if isinstance(session, dict)]
        if not sessions:
            notes.append("environment.json names no session")
    except ValueError as error:
        notes.append(str(error))
    rows = {name: _rows(folder / name, notes) for name in NUMBERS}
    if not rows["eval.jsonl"] and not rows["perplexity.jsonl"]:
        raise ValueError("; ".join([f"has no results: run tra evaluate {folder} first", *notes]))
    if not rows["metrics.jsonl"]:
        notes.append("has no metrics.jsonl, so no training curve")
    maps = None
    if (folder / "attend.npz").is_file():
        try:
            maps = _maps(folder / "attend.npz")
        except (ValueError, OSError) as error:
            notes.append(f"its attention maps are left out: {_one_line(error)}")
    metrics, evaluation, diagnosis, perplexity = rows.values()
    return PageRun(str(folder), config, sessions, metrics, evaluation, diagnosis, perplexity, maps), notes


def _maps(file: Path) -> AttentionMaps:
    maps = read_attention(file)
    if maps.weights.size == 0 or (len(maps.row_symbols), len(maps.symbols)) != maps.weights.shape[2:]:
        raise ValueError(f"{file.name} is damaged: a symbol is due for every query and key")
    return maps


def _json(file: Path) -> Any:
    if not file.is_file():
        raise ValueError(f"has no {file.name}")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is damaged: {_one_line(error)}") from None


def _check(config: Any) -> None:
    """As much of a config as the page relies on."""
    for section, key, kind in (("task", "name", str), ("model", "mechanism", str), ("train", "seed", int)):
        part = config.get(section) if isinstance(config, dict) else None
        if not isinstance(part, dict) or not isinstance(part.get(key), kind):
            raise ValueError(f"config.json is damaged: no {section}.{key}")
    if not isinstance(config["task"].setdefault("arguments", {}), dict):
        raise ValueError("config.json is damaged: task.arguments is not an object")


def _rows(file: Path, notes: list[str]) -> list[Row]:
    """The lines that can be read; how many can't is noted."""
    if not file.is_file():
        return []
    lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]
    rows = [row for line in lines if (row := _row(line, file.name)) is not None]
    if len(rows) < len(lines):
        notes.append(f"{len(lines) - len(rows)} of {len(lines)} lines of {file.name} are damaged and left out")
    return rows


def _row(line: bytes, name: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in TEXTS[name]):
        return None
    return row if all(_is_number(row.get(key), name, key) for key in NUMBERS[name]) else None


def _is_number(value: Any, name: str, key: str) -> bool:
    """Finite; a loss that is not, in training, is a fact of the run."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) or (name, key) == ("metrics.jsonl", "loss")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
