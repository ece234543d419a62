"""Sort runs into a section per task, with a group per variant and setting, whose runs differ in seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tra.report.breakdowns import mark
from tra.report.names import name_of, table_order
from tra.report.runs import EvaluatedRun, Problem

_HABITS = ("seed", "compile", "log_every", "checkpoint_every")
_IN_NAMES = ("model.mechanism", "model.arguments.", "model.threshold", "model.margin")
"""Settings that are part of a variant's name."""

MAY_DIFFER = ("task.", "evaluate.", "version", *(f"train.{name}" for name in _HABITS), *_IN_NAMES)
"""Settings in which runs of one group may differ: they don't change what is learnt, or are compared elsewhere."""


@dataclass
class Group:
    """Runs of one variant in one setting, one per seed."""

    variant: str
    label: str
    runs: list[EvaluatedRun]

    @property
    def mechanism(self) -> str:
        return self.runs[0].mechanism


@dataclass
class Section:
    """Runs of one task."""

    groups: list[Group]

    @property
    def runs(self) -> list[EvaluatedRun]:
        return [run for group in self.groups for run in group.runs]

    @property
    def task(self) -> str:
        return self.runs[0].task

    @property
    def title(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.runs[0].config["task"]["arguments"].items())
        return f"{self.task} ({settings})" if settings else self.task


def sort_runs(runs: Sequence[EvaluatedRun]) -> tuple[list[Section], list[Problem]]:
    """Return sections in the order of the runs, and the runs that were left out as another has their config and seed.

    Groups stand in the order of tables.
    """
    by_task: dict[str, list[EvaluatedRun]] = {}
    for run in runs:
        by_task.setdefault(_text(run.config["task"]), []).append(run)
    sections: list[Section] = []
    problems: list[Problem] = []
    for of_task in by_task.values():
        configs = _shared_settings(of_task)
        found: dict[tuple[str, str], dict[int, EvaluatedRun]] = {}
        for run, config in zip(of_task, configs, strict=True):
            setting = {key: config[key] for key in config if not key.startswith(MAY_DIFFER)}
            seeds = found.setdefault((run.variant, _text(setting)), {})
            if run.seed in seeds:
                why = f"has the same config and seed as {seeds[run.seed].name}, which is shown"
                problems.append(Problem(run.name, why, whole=True))
            else:
                seeds[run.seed] = run
        sections.append(Section(_labelled({key: list(seeds.values()) for key, seeds in found.items()})))
    return sections, problems


def differing_settings(runs: Sequence[EvaluatedRun]) -> dict[str, list[Any]]:
    """Return settings by dotted key that are not the same in all runs, with their values in order of appearance."""
    configs = _shared_settings(runs)
    found: dict[str, list[Any]] = {}
    for key in configs[0]:
        values = {_text(config[key]): config[key] for config in configs}
        if len(values) > 1 and not key.startswith(MAY_DIFFER):
            found[key] = list(values.values())
    return found


def _labelled(found: dict[tuple[str, str], list[EvaluatedRun]]) -> list[Group]:
    order = table_order(variant for variant, _ in found)
    groups = []
    for variant, setting in sorted(found, key=lambda key: order.index(key[0])):
        same_variant = [runs[0] for (name, _), runs in found.items() if name == variant]
        settings = json.loads(setting)
        differences = [f", {key.rsplit('.', 1)[-1]} {settings[key]}" for key in differing_settings(same_variant)]
        runs = sorted(found[variant, setting], key=lambda run: run.seed)
        groups.append(Group(variant, name_of(variant) + "".join(differences) + mark(runs), runs))
    return groups


def _shared_settings(runs: Sequence[EvaluatedRun]) -> list[dict[str, Any]]:
    """Return each run's settings by dotted key, those that all have: what an older version lacks is no difference."""
    configs = [_flat({key: run.config[key] for key in run.config if key != "imports"}) for run in runs]
    for run, config in zip(runs, configs, strict=True):
        config["code"] = run.code
    shared = set.intersection(*map(set, configs))
    return [{key: config[key] for key in sorted(shared)} for config in configs]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
