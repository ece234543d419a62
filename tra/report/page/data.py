"""Turn run folders into one JSON-able value: all that the page shows, in the words and numbers that it shows."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tra
from tra.report.groups import Section, sort_runs
from tra.report.names import colours_of
from tra.report.page.charts import charts
from tra.report.page.maps import encode_maps, fit_maps, read_maps
from tra.report.page.summary import summary
from tra.report.page.tables import tables
from tra.report.runs import EvaluatedRun, Problem, load_runs


def page_data(folders: Sequence[Path], out: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Return what a page holds, and what could not be read. A ValueError where no run can be shown."""
    runs, problems = load_runs(folders)
    if not runs:
        reasons = "; ".join(f"{problem.run} {problem.why}" for problem in problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"no run can be shown: {reasons}{more}")
    sections, doubles = sort_runs(runs)
    # the first map of every group before the second of any
    turns = [(place, run) for section in sections for group in section.groups for place, run in enumerate(group.runs)]
    found, damaged = read_maps([run for _, run in sorted(turns, key=lambda turn: turn[0])])
    fitting, note = fit_maps(found)
    maps = {name: encode_maps(of) for name, of in fitting.items()}
    problems += damaged + doubles
    shown = sum(len(section.runs) for section in sections)
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
    mechanisms = [group.mechanism for group in section.groups]
    colours = colours_of(group.variant for group in section.groups)
    labelled = [(run, f"{group.label}, seed {run.seed}") for group in section.groups for run in group.runs]
    return {
        "title": section.title,
        "summary": summary(section),
        "groups": [
            {
                "label": group.label,
                "colour": colours[group.variant],
                "variant": mechanisms[:number].count(group.mechanism),
            }
            for number, group in enumerate(section.groups)
        ],
        "tables": tables(section),
        "charts": charts(section),
        "maps": [{"run": run.name, "label": label, **maps[run.name]} for run, label in labelled if run.name in maps],
        "runs": [_run(run, label) for run, label in labelled],
    }


def _run(run: EvaluatedRun, label: str) -> dict[str, Any]:
    last = run.sessions[-1] if run.sessions else {}
    facts = {key: last[key] for key in ("commit", "device", "torch", "started") if last.get(key)}
    if run.metrics:
        facts |= {"steps": f"{run.metrics[-1]['step']:,}", "final loss": f"{run.metrics[-1]['loss']:.3g}"}
    commands = [_command(session.get("arguments")) for session in run.sessions]
    return {
        "name": run.name,
        "label": label,
        "commands": list(dict.fromkeys(command for command in commands if command)),
        "facts": [[name, str(value)] for name, value in facts.items()],
        "config": json.dumps(run.config, indent=2, ensure_ascii=False),
        "environment": json.dumps(run.sessions, indent=2, ensure_ascii=False),
    }


def _command(arguments: Any) -> str:
    """Return a command as it was typed, or nothing where that isn't known."""
    return shlex.join(["tra", *(str(part) for part in arguments)]) if isinstance(arguments, list) and arguments else ""


def clean(value: Any) -> Any:
    """Replace what JSON or UTF-8 can't hold: NaN and infinity by null, lone surrogates by a replacement character."""
    if isinstance(value, dict):
        return {clean(key): clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [clean(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
