"""Run folders as one JSON-able value: everything the page shows, in the words and numbers that it shows."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tra
from tra.report._names import COLOURS
from tra.report.page.charts import charts
from tra.report.page.groups import Section, sort_runs
from tra.report.page.maps import encoded, fitted
from tra.report.page.read import PageRun, Problem, read_page_runs
from tra.report.page.summary import summary
from tra.report.page.tables import tables

UNKNOWN = "#7F7F7F"
"""The colour of a mechanism that has none."""


def page_data(folders: Sequence[Path], out: Path) -> tuple[dict[str, Any], list[Problem]]:
    """What a page holds, and what it couldn't take in. A ValueError where no run can be shown."""
    if not folders:
        raise ValueError("name at least one run folder")
    runs, problems = read_page_runs(folders)
    if not runs:
        reasons = "; ".join(f"{problem.run} {problem.why}" for problem in problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"no run can be shown: {reasons}{more}")
    sections, doubles = sort_runs(runs)
    problems += doubles
    # the first map of every group before the second of any
    turns = [(place, run) for section in sections for group in section.groups for place, run in enumerate(group.runs)]
    mapped = [run for _, run in sorted(turns, key=lambda turn: turn[0]) if run.maps is not None]
    kept, note = fitted([run.maps for run in mapped if run.maps is not None])
    maps = {run.name: encoded(cut) for run, cut in zip(mapped, kept, strict=True) if cut is not None}
    shown = len([run for section in sections for run in section.runs])
    data = {
        "title": ", ".join(dict.fromkeys(section.task for section in sections)),
        "version": tra.__version__,
        "count": f"{shown} {'run' if shown == 1 else 'runs'} of {len(folders)} shown" if problems else f"{shown} runs",
        "command": shlex.join(["tra", "report", *(str(folder) for folder in folders), "--out", str(out)]),
        "problems": [problem._asdict() for problem in problems],
        "maps_note": note,
        "sections": [_section(section, maps) for section in sections],
    }
    return clean(data), problems


def _section(section: Section, maps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    groups = []
    for number, group in enumerate(section.groups):
        colour = COLOURS.get(group.mechanism, UNKNOWN)
        before = sum(other.mechanism == group.mechanism for other in section.groups[:number])
        groups.append({"label": group.label, "colour": colour, "variant": before})
    return {
        "title": section.title,
        "summary": summary(section),
        "groups": groups,
        "tables": tables(section),
        "charts": charts(section),
        "maps": [
            {"run": run.name, "label": f"{group.label}, seed {run.seed}", **maps[run.name]}
            for group in section.groups
            for run in group.runs
            if run.name in maps
        ],
        "runs": [_run(run, group.label) for group in section.groups for run in group.runs],
    }


def _run(run: PageRun, label: str) -> dict[str, Any]:
    commands = [_command(session.get("arguments")) for session in run.sessions]
    last = run.sessions[-1] if run.sessions else {}
    facts = {key: last.get(key) for key in ("commit", "device", "torch", "started") if last.get(key)}
    if run.metrics:
        facts |= {"steps": f"{run.metrics[-1]['step']:,}", "final loss": f"{run.metrics[-1]['loss']:.3g}"}
    return {
        "name": run.name,
        "label": f"{label}, seed {run.seed}",
        "commands": list(dict.fromkeys(command for command in commands if command)),
        "facts": [[name, str(value)] for name, value in facts.items()],
        "config": json.dumps(run.config, indent=2, ensure_ascii=False),
        "environment": json.dumps(run.sessions, indent=2, ensure_ascii=False),
    }


def _command(arguments: Any) -> str:
    """As it was typed; empty where it isn't known."""
    return shlex.join(["tra", *(str(part) for part in arguments)]) if isinstance(arguments, list) and arguments else ""


def clean(value: Any) -> Any:
    """JSON knows no NaN and no infinity, and UTF-8 no lone surrogates: null, and a replacement character."""
    if isinstance(value, dict):
        return {clean(key): clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [clean(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
