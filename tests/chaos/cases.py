"""Disturb a command once, and judge what is left: nothing lost, run again to the same bits, nothing lying about."""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.chaos.processes import Fault, Outcome, run, run_both
from tests.chaos.scenarios import Scenario, lay_out, whole_names
from tests.chaos.snapshots import Snapshot, differences, part, snapshot
from tests.chaos.syscalls import NEEDS_SPACE, Call

KINDS = {
    "kill": "kill -9 before a change",
    "half": "kill -9 in the middle of a write",
    "kill-one": "kill -9 of a cell, while its suite goes on",
    "full": "the disk is full from a change on",
    "hold": "a second process, while the first stands before a change",
    "clock": "the clock goes back by a day at each look, and (above 0) a kill",
}
PROPERTIES = {
    "kept": "what was there and complete is there and intact, or wholly replaced",
    "again": "the same command, run again, succeeds",
    "same": "after it, contents are those of an undisturbed run",
    "litter": "after it, nothing is left lying about",
    "line": "a full disk gives status 1 and one line",
    "claim": "a message that says that nothing is left is right",
    "second": "of two processes one wins, and the other gets one line",
    "outside": "nothing is written outside the folder",
    "hang": "it ends",
}


ABSENT = "absent"


class Reference(NamedTuple):
    """What an undisturbed run does."""

    outcome: Outcome
    before: Snapshot
    after: Snapshot
    versions: dict[str, set[str]]  # path -> contents that it had at some time
    after_rival: Snapshot  # what there is when a rival has run too


class Case(NamedTuple):
    scenario: Scenario
    fault: Fault

    def __str__(self) -> str:
        return f"{self.scenario.name} {self.fault}"


class Failure(NamedTuple):
    """A property that didn't hold."""

    scenario: str
    fault: str
    property: str
    change: str  # at which the fault struck
    detail: str


def observe(scenario: Scenario, templates: Path, folder: Path) -> Reference:
    """Run a scenario undisturbed, and remember what there is to compare with."""
    lay_out(scenario, templates, folder)
    before = snapshot(folder)
    versions: dict[str, set[str]] = defaultdict(set)

    def look(_: Call) -> None:
        state = snapshot(folder)
        for path in state.keys() | before.keys():
            versions[path].add(state.get(path, ABSENT))

    outcome = run(scenario.command, folder, look=look)
    if outcome.status != 0:
        raise RuntimeError(f"tra {scenario.command}: status {outcome.status}\n{outcome.output}\n{outcome.errors}")
    after = snapshot(folder)
    for state in (before, after):
        for path, content in state.items():
            versions[path].add(content)
    if scenario.rival is not None:
        run(scenario.rival, folder)
    after_rival = snapshot(folder)
    shutil.rmtree(folder)
    return Reference(outcome, before, after, versions, after_rival)


def cases_of(scenario: Scenario, reference: Reference, kinds: Sequence[str], most: int | None = None) -> list[Case]:
    """Return a case for every kind and change; with `most`, that many of each kind, evenly spaced."""
    outcome = reference.outcome
    everywhere = range(1, len(outcome.changes) + 1)
    first_pid = outcome.pids[0]
    places = {
        "kill": list(everywhere),
        "half": [n for n in everywhere if outcome.sizes[n - 1] > 1],
        "kill-one": [n for n in everywhere if outcome.pids[n - 1] != first_pid],
        "full": [n for n in everywhere if outcome.names[n - 1] in NEEDS_SPACE],
        "hold": list(everywhere),
        "clock": [0, len(everywhere) // 2],
    }
    if scenario.rival is not None:
        kinds = [kind for kind in kinds if kind == "hold"]
    return [Case(scenario, Fault(kind, n)) for kind in kinds for n in _spread(places[kind], most)]


def judge(case: Case, reference: Reference, templates: Path, folder: Path) -> list[Failure]:
    """Run one case in a folder of its own."""
    scenario, fault = case
    lay_out(scenario, templates, folder)
    found: list[tuple[str, str]] = []
    if fault.kind == "hold":
        outcome, second = run_both(scenario.command, scenario.rival or scenario.command, folder, fault.at)
        found += _judge_two(scenario, reference, outcome, second, fault, folder)
    else:
        found += _judge_one(scenario, reference, fault, templates, folder)
    change = reference.outcome.changes[fault.at - 1] if fault.at else ""
    where, words = str(folder), dict(found)
    return [
        Failure(scenario.name, str(fault), name, _without_ids(change), _without_ids(detail.replace(where, ".")))
        for name, detail in words.items()
    ]


def _judge_one(
    scenario: Scenario, reference: Reference, fault: Fault, templates: Path, folder: Path
) -> list[tuple[str, str]]:
    clock = fault.kind == "clock"
    strike = Fault("kill", fault.at) if clock and fault.at else None if clock else fault
    outcome = run(scenario.command, folder, strike, clock_goes_back=clock)
    found = _judge_ending(outcome)
    now = snapshot(folder)
    if fault.kind == "full":
        found += _judge_full(reference, outcome, now)
    if not (clock and not fault.at):
        found += [("kept", detail) for detail in _lost(scenario, reference, now, whole_names(scenario, templates))]
        outcome = run(scenario.repeat, folder, clock_goes_back=clock)
        found += _judge_ending(outcome)
    now = snapshot(folder)
    if outcome.status == 2 and scenario.refusal is not None and scenario.refusal in outcome.errors:
        return found
    is_there = outcome.status == 2 and "exists already" in outcome.errors
    is_whole = all(now.get(path) == content for path, content in reference.after.items())
    if outcome.status != 0 and not (is_there and is_whole):
        found.append(("again", f"status {outcome.status}: {_tail(outcome)}"))
    else:
        found += _compare(reference.after, now)
    return found


def _judge_ending(outcome: Outcome) -> list[tuple[str, str]]:
    found = [("hang", "it was ended after a minute")] if outcome.is_hanging else []
    return found + [("outside", outcome.outside[0]) for _ in outcome.outside[:1]]


def _judge_full(reference: Reference, outcome: Outcome, now: Snapshot) -> list[tuple[str, str]]:
    if outcome.status == 0:
        lacking = differences(part_of_files(reference.after), part_of_files(now))
        return [("line", f"status 0, but {lacking[0]}")] if lacking else []
    found = []
    lines = _new_lines(reference, outcome)
    if outcome.status != 1 or len(lines) != 1 or "Traceback" in outcome.errors:
        found.append(("line", f"status {outcome.status}, {len(lines)} lines: {_tail(outcome)}"))
    if "nothing is left" in outcome.errors:
        left = [path for path in now if path not in reference.before]
        found += [("claim", f"{path} is left") for path in left[:1]]
    return found


def _judge_two(
    scenario: Scenario, reference: Reference, first: Outcome, second: Outcome, fault: Fault, folder: Path
) -> list[tuple[str, str]]:
    found = _judge_ending(first) + _judge_ending(second)
    statuses = (first.status, second.status)
    said = f"status {first.status} ({_tail(first)}) and {second.status} ({_tail(second)})"
    # Held before it took a lock, the first may replace, or find done, what the second has made.
    in_turn = scenario.second == "in turn" and fault.at <= 2
    losers = [outcome for outcome in (first, second) if outcome.status != 0]
    if len(losers) == 2:
        found.append(("second", f"neither won: {said}"))
    elif not losers and scenario.second != "same" and not in_turn:
        found.append(("second", "both worked on one folder to the end, with status 0"))
    for loser in losers:
        if loser.status not in (1, 2) or len(_new_lines(reference, loser)) != 1:
            found.append(("second", f"not one line: {said}"))
    if 0 in statuses:
        found += _compare(reference.after if losers else reference.after_rival, snapshot(folder))
    return found


def _lost(scenario: Scenario, reference: Reference, now: Snapshot, whole: list[str]) -> list[str]:
    """Return what a disturbance has harmed."""
    before, after, versions = reference.before, reference.after, reference.versions
    lost = []
    for name in whole:
        state = part(now, name)
        states = [part(before, name), part(after, name)]
        if state not in states:
            lost.append(f"{name} is neither as before nor as after: {'; '.join(differences(states[0], state)[:2])}")
    for path, content in before.items():
        if versions[path] == {content} and after.get(path) == content and now.get(path) != content:
            lost.append(f"{path} is {'harmed' if path in now else 'lost'}, which nobody should touch")
    for path, content in now.items():
        if any(fnmatch.fnmatch(path, pattern) for pattern in scenario.versions) and content not in versions[path]:
            lost.append(f"{path} is torn")
    for path in before:
        is_ours = any(fnmatch.fnmatch(path, pattern) for pattern in scenario.versions)
        if is_ours and path in after and path not in now:
            lost.append(f"{path} is lost")
    if scenario.replaces is not None:
        old = {path for path in part(before, scenario.replaces) if path[-1] != "/" and "environment" not in path}
        old.discard(f"{scenario.replaces}/lock")
        there = {path for path in old if now.get(path) == before[path]}
        if there and there != old:
            lost.append(f"{len(there)} of {len(old)} files of the old run are left")
    return lost


def _compare(expected: Snapshot, now: Snapshot) -> list[tuple[str, str]]:
    """Return what differs from the end of an undisturbed run, and what is left lying about."""
    found = differences(expected, now)
    litter = [words for words in found if words.endswith(" is left")]
    other = [words for words in found if not words.endswith(" is left")]
    return [("litter", "; ".join(litter[:3]))] * bool(litter) + [("same", "; ".join(other[:3]))] * bool(other)


def _without_ids(words: str) -> str:
    """Return words without the ids of processes in names of temporary files."""
    return re.sub(r"\.\d+\.tmp", ".PID.tmp", words)


def part_of_files(state: Snapshot) -> Snapshot:
    return {path: content for path, content in state.items() if not path.endswith("/")}


def _new_lines(reference: Reference, outcome: Outcome) -> list[str]:
    """Return lines on stderr that an undisturbed run doesn't print."""
    usual = set(reference.outcome.error_lines)
    return [line for line in outcome.error_lines if line not in usual and ": resuming at step" not in line]


def _tail(outcome: Outcome) -> str:
    lines = outcome.error_lines
    kind = "traceback, " if "Traceback" in outcome.errors else ""
    return kind + (lines[-1][:200] if lines else "no line")


def _spread(places: list[int], most: int | None) -> list[int]:
    if most is None or len(places) <= most:
        return places
    if most == 1:
        return [places[len(places) // 2]]
    return sorted({places[round(n * (len(places) - 1) / (most - 1))] for n in range(most)})
