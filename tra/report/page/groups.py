"""Runs sorted for the page: a section per task, in it a group per mechanism and setting, whose runs differ in seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tra.report._names import NAMES
from tra.report.page.read import PageRun, Problem
from tra.tasks import TASKS

ASIDE = ("task.", "evaluate.", "version", "train.seed", "train.compile", "train.log_every", "train.checkpoint_every")
"""What two runs of one group may differ in."""


@dataclass
class Group:
    """Runs of one mechanism in one setting, a seed each."""

    mechanism: str
    label: str
    runs: list[PageRun]


@dataclass
class Section:
    """Runs of one task."""

    task: str
    arguments: dict[str, Any]
    groups: list[Group] = field(default_factory=list)

    @property
    def title(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.arguments.items())
        return f"{self.task} ({settings})" if settings else self.task

    @property
    def runs(self) -> list[PageRun]:
        return [run for group in self.groups for run in group.runs]

    @property
    def trained_length(self) -> int | None:
        """Of the longest training sequence, in the task's own count; None where it isn't known."""
        if self.task == "text":
            window = self.arguments.get("window")
            return window if isinstance(window, int) else None
        try:
            return TASKS[self.task](**self.arguments).lengths("train").longest
        except (KeyError, TypeError, ValueError):
            return None


def sort_runs(runs: Sequence[PageRun]) -> tuple[list[Section], list[Problem]]:
    """Sections in the order of the runs, groups in that of NAMES. A run made twice is shown once."""
    by_task: dict[str, list[PageRun]] = {}
    for run in runs:
        by_task.setdefault(_text(run.config["task"]), []).append(run)
    sections: list[Section] = []
    problems: list[Problem] = []
    for those in by_task.values():
        section = Section(those[0].config["task"]["name"], those[0].config["task"]["arguments"])
        settings = {run.name: _flat(run.config) for run in those}
        # what an older version didn't know yet is no difference
        shared = set.intersection(*({*setting} for setting in settings.values()))
        found: dict[tuple[str, str], dict[int, PageRun]] = {}
        for run in those:
            setting = {key: settings[run.name][key] for key in sorted(shared) if not key.startswith(ASIDE)}
            seeds = found.setdefault((run.mechanism, _text(setting)), {})
            if run.seed in seeds:
                why = f"has the same config and seed as {seeds[run.seed].name}, which is shown"
                problems.append(Problem(run.name, why, whole=True))
            else:
                seeds[run.seed] = run
        section.groups = _labelled({key: list(seeds.values()) for key, seeds in found.items()})
        sections.append(section)
    return sections, problems


def differing(runs: Sequence[PageRun]) -> dict[str, list[Any]]:
    """Settings, by dotted key, that are not the same in all runs, with their values in order of appearance."""
    flat = [_flat(run.config) for run in runs]
    shared = set.intersection(*({*setting} for setting in flat))
    found: dict[str, list[Any]] = {}
    for key in sorted(key for key in shared if not key.startswith(ASIDE) and key != "model.mechanism"):
        values = {_text(setting[key]): setting[key] for setting in flat}
        if len(values) > 1:
            found[key] = list(values.values())
    return found


def _labelled(found: dict[tuple[str, str], list[PageRun]]) -> list[Group]:
    order = [*NAMES, *(mechanism for mechanism, _ in found)]
    groups = []
    for mechanism, setting in sorted(found, key=lambda key: order.index(key[0])):
        siblings = [runs for (name, _), runs in found.items() if name == mechanism]
        keys = differing([runs[0] for runs in siblings])
        label = NAMES.get(mechanism, mechanism)
        for key in keys:
            label += f", {key.rsplit('.', 1)[-1]} {json.loads(setting)[key]}"
        runs = sorted(found[mechanism, setting], key=lambda run: run.seed)
        groups.append(Group(mechanism, label, runs))
    return groups


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
