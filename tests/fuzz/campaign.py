"""How many examples are tried, what is counted, and what becomes of a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.command import SOFT_SECONDS, Outcome, run
from tests.fuzz.known import KNOWN
from tests.fuzz.promises import check
from tests.fuzz.sandbox import Sandbox, Snapshot, snapshot, tiny_presets

TOTAL = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""Examples of all targets together in a long run; 0 is a short one, the same every time."""
MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
"""Minutes on the clock that each of two processes may take for a long run; 0 is no limit."""
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))
SHARDS = 8
"""Parts of a long run's target, so that several processes share it."""
FAILURES = os.environ.get("FUZZ_FAILURES")
"""A folder: collect failures there, the shortest command line of each kind, instead of stopping at the first."""
REPORT_SECONDS = 10
"""Time between two reports of how far a long run is."""
CONFIRMING_FACTOR = 4
"""A command that seems slow gets this many times as long before it is called so."""

COUNTS: dict[str, Counter[str]] = {}


@dataclasses.dataclass(frozen=True)
class Examples:
    """A number of examples of one target, and where they begin."""

    target: str
    number: int
    start: int = 0
    seconds: float = 0.0
    """Time after which no more are tried; 0 is no limit."""

    def run(self, strategy: st.SearchStrategy[Any], test: Callable[[Any], None]) -> None:
        """Call `test` with examples of a strategy."""

        begun, used = time.monotonic(), time.process_time()

        @seed(self.start)
        @settings(
            max_examples=self.number,
            deadline=None,
            database=None,
            phases=[Phase.generate] if FAILURES else [Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            derandomize=False,
        )
        @given(strategy)
        def each(example: Any) -> None:
            if not self.seconds or time.monotonic() - begun < self.seconds:
                test(example)

        try:
            with tiny_presets():
                each()
        finally:
            counts = COUNTS.setdefault(self.target, Counter())
            counts["seconds"] += round(time.monotonic() - begun)
            counts["seconds of processor"] += round(time.process_time() - used)
            if "FUZZ_PARTS" in os.environ:
                write_counts(Path(os.environ["FUZZ_PARTS"]))

    def __str__(self) -> str:
        return f"{self.number}-from-{self.start}"


def shards(target: str, *, quick: int, slow: int, share: float, time_share: float = 0.1) -> Any:
    """Parametrize a test by its examples: few quick ones and more slow ones, or its share of a long run.

    Args:
        share: Part of a long run's examples.
        time_share: Part of its time, where that is limited.
    """
    if TOTAL:
        number = max(1, round(TOTAL * share / SHARDS))
        seconds = 2 * 60 * MINUTES * time_share / SHARDS
        cases: list[Any] = [Examples(target, number, 1000 * FIRST_SEED + shard, seconds) for shard in range(SHARDS)]
    else:
        cases = [Examples(target, quick)] if quick else []
        cases.append(pytest.param(Examples(target, slow, 1), marks=pytest.mark.slow))
    return pytest.mark.parametrize("examples", cases, ids=str)


def examine(
    target: str,
    sandbox: Sandbox,
    arguments: Sequence[str],
    prepare: Callable[[Path], object] | None = None,
    told: str = "",
    call: Callable[[], object] | None = None,
) -> None:
    """Run one command line in a fresh sandbox, and hold it to its promises.

    Args:
        prepare: Damages the files first.
        told: How, for the report.
        call: Takes the command's place.
    """
    outcome, broken = _attempt(sandbox, arguments, prepare, call, SOFT_SECONDS)
    unknown = [failure for failure in broken if failure not in KNOWN]
    if any(failure.startswith(("Slow", "Hang")) for failure in unknown):
        outcome, broken = _attempt(sandbox, arguments, prepare, call, CONFIRMING_FACTOR * SOFT_SECONDS)
        unknown = [failure for failure in broken if failure not in KNOWN]
    counts = COUNTS.setdefault(target, Counter())
    counts["examples"] += 1
    counts["interrupted" if outcome.was_interrupted else f"status {outcome.status}"] += 1
    counts["with known failures"] += bool(set(broken) - set(unknown))
    counts["with new failures"] += bool(unknown)
    _report_progress()
    if not unknown:
        return
    line = f"tra {shlex.join(arguments)}"
    if FAILURES:
        for failure in unknown:
            _record(failure, line, told, outcome)
        return
    raise AssertionError(
        f"{'; '.join(unknown)}\n{told}\n{line[:2000]}\n{outcome.stderr[:2000]}\n{outcome.trace[-3000:]}"
    )


_reported_at = 0.0


def _report_progress() -> None:
    """Write the counts every few seconds, so that a long run that is stopped has them."""
    global _reported_at
    if "FUZZ_PARTS" in os.environ and time.monotonic() - _reported_at > REPORT_SECONDS:
        _reported_at = time.monotonic()
        folder = Path(os.environ["FUZZ_PARTS"])
        write_counts(folder)
        write_report(folder)


def _attempt(
    sandbox: Sandbox,
    arguments: Sequence[str],
    prepare: Callable[[Path], object] | None,
    call: Callable[[], object] | None,
    seconds: float,
) -> tuple[Outcome, list[str]]:
    place = sandbox.fresh()
    if prepare is not None:
        sandbox.is_fresh = False
        prepare(place)
    before = snapshot(sandbox.root) if prepare is not None else _first_snapshot(sandbox)
    outcome = run(arguments, place, seconds, call)
    after = snapshot(sandbox.root)
    if before != after:
        sandbox.is_fresh = False
    return outcome, check(outcome, before, after, _intact(sandbox), _first_snapshot(sandbox))


_FIRST: dict[Path, Snapshot] = {}


def _first_snapshot(sandbox: Sandbox) -> Snapshot:
    if sandbox.template not in _FIRST:
        _FIRST[sandbox.template] = snapshot(sandbox.template)
    return _FIRST[sandbox.template]


def _intact(sandbox: Sandbox) -> frozenset[bytes]:
    found = _first_snapshot(sandbox)
    return frozenset(c for name, c in found.items() if "/checkpoints/" in name and isinstance(c, bytes))


_RECORDED: dict[str, dict[str, Any]] = {}


def _record(failure: str, line: str, told: str, outcome: Outcome) -> None:
    known = _RECORDED.get(failure)
    times = 1 if known is None else known["times"] + 1
    if known is None or len(line + told) < len(known["line"] + known["damage"]):
        trace, said = outcome.trace[-2500:], outcome.stderr[:600]
        _RECORDED[failure] = {"line": line, "damage": told, "status": outcome.status, "stderr": said, "trace": trace}
    _RECORDED[failure]["times"] = times
    assert FAILURES is not None
    folder = Path(FAILURES)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_RECORDED, indent=1)
    (folder / f"{os.getpid()}.json").write_text(text)


def write_counts(folder: Path) -> None:
    """Write this process's counts."""
    if COUNTS:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{os.getpid()}.tmp"
        temporary.write_text(json.dumps(COUNTS))
        temporary.replace(folder / f"{os.getpid()}.json")


def write_report(parts: Path) -> None:
    """Write the counts of all processes to the file FUZZ_REPORT, with seed, commit and time, if it is asked for."""
    report, counts = os.environ.get("FUZZ_REPORT"), merged_counts(parts)
    if not report or not counts:
        return
    failures = sum(found.get("with new failures", 0) for found in counts.values())
    facts = {
        "examples": sum(found.get("examples", 0) for found in counts.values()),
        "failures": failures,
        "seed": FIRST_SEED,
        "commit": _commit(),
        "started": os.environ.get("FUZZ_STARTED"),
        "seconds": round(time.time() - float(os.environ.get("FUZZ_BEGUN", time.time()))),
        "targets": counts,
    }
    file = Path(report)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(facts, indent=2) + "\n")
    temporary.replace(file)


@cache
def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def merged_counts(folder: Path) -> dict[str, dict[str, int]]:
    """Return the counts of all processes, by target."""
    merged: dict[str, Counter[str]] = {}
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValueError):
            for target, counts in json.loads(file.read_text()).items():
                merged.setdefault(target, Counter()).update(counts)
    return {target: dict(sorted(counts.items())) for target, counts in sorted(merged.items())}
