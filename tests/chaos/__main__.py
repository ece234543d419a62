"""Disturb every command at every change: `python -m tests.chaos`.

python -m tests.chaos --jobs 2                                       all of it
python -m tests.chaos --most 2                                       two places of each kind
python -m tests.chaos --only prepare-overwrite --kinds kill --at 17  one case
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.chaos.cases import KINDS, PROPERTIES, Case, Failure, Reference, cases_of, judge, observe
from tests.chaos.known import KNOWN
from tests.chaos.planted import PLANTED, judge_planted
from tests.chaos.processes import warm_up
from tests.chaos.scenarios import SCENARIOS, make_templates
from tests.chaos.syscalls import is_supported


def main() -> int:
    options = _parse()
    if not is_supported():
        print("this needs Linux 5.5 or later, on x86_64 or aarch64, and leave to use seccomp", file=sys.stderr)
        return 2
    begun = time.monotonic()
    shared_memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="chaos-", dir=shared_memory if shared_memory.is_dir() else None))
    try:
        warm_up()
        (place / "templates").mkdir()
        make_templates(place / "templates")
        chosen = [
            scenario
            for scenario in SCENARIOS
            if (scenario.name in options.only if options.only else not (options.short and scenario.is_long))
        ]
        references = {
            scenario.name: observe(scenario, place / "templates", place / f"whole-{scenario.name}")
            for scenario in chosen
        }
        cases = [
            case
            for scenario in chosen
            for case in cases_of(scenario, references[scenario.name], options.kinds, options.most)
            if options.at is None or case.fault.at == options.at
        ]
        if options.list:
            for case in cases:
                print(case, references[case.scenario.name].outcome.changes[case.fault.at - 1])
            return 0
        print(f"{len(cases)} cases, ready after {time.monotonic() - begun:.0f} s", flush=True)
        deadline = None if options.minutes is None else begun + 60 * options.minutes
        failures, done = _run_all(cases, references, place, options.jobs, deadline, options.keep)
        for planted in PLANTED:
            if not options.only or planted.scenario.name in options.only:
                failures += judge_planted(planted, place / "templates", place / planted.scenario.name)
    finally:
        if not options.keep:
            shutil.rmtree(place, ignore_errors=True)
        else:
            print(f"kept: {place}")
    if not options.only and options.most is None and options.at is None and len(done) == len(cases):
        _print_mended(failures, options.kinds)
    return _tell(cases, done, failures, options.report, time.monotonic() - begun)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    names = [scenario.name for scenario in SCENARIOS] + [planted.scenario.name for planted in PLANTED]
    parser.add_argument("--only", nargs="*", choices=names, metavar="SCENARIO", help=", ".join(names))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--at", type=int, help="strike at this change alone")
    parser.add_argument("--most", type=int, help="places of each kind and scenario, evenly spaced (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default: 1)")
    parser.add_argument("--minutes", type=float, help="begin no case after this time (default: run all)")
    parser.add_argument("--report", type=Path, help="write counts and failures to this file, as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the folders")
    parser.add_argument("--list", action="store_true", help="list cases, and run none")
    parser.add_argument("--short", action="store_true", help="like --most 1, and without the longest scenarios")
    options = parser.parse_args()
    options.most = 1 if options.short else options.most
    return options


def _run_all(
    cases: Sequence[Case],
    references: dict[str, Reference],
    place: Path,
    jobs: int,
    deadline: float | None,
    keep: bool,
) -> tuple[list[Failure], list[int]]:
    """Run all cases in forked workers; return failures, and the numbers of the cases that were run."""
    order = list(range(len(cases)))
    random.Random(0).shuffle(order)  # the workers end together, and a run cut short has seen a bit of everything
    workers = []
    for worker in range(jobs):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with (place / f"worker-{worker}.jsonl").open("w") as file:
                    for number in order[worker::jobs]:
                        if deadline is not None and time.monotonic() > deadline:
                            break
                        folder = place / f"case-{number}"
                        begun = time.monotonic()
                        found = judge(
                            cases[number], references[cases[number].scenario.name], place / "templates", folder
                        )
                        file.write(json.dumps([number, found, time.monotonic() - begun]) + "\n")
                        file.flush()
                        if not keep:
                            shutil.rmtree(folder)
                status = 0
            finally:
                if status:
                    import traceback

                    traceback.print_exc()
                os._exit(status)
        workers.append(pid)
    broken = [pid for pid in workers if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0]
    lines = [line for file in sorted(place.glob("worker-*.jsonl")) for line in file.read_text().splitlines()]
    if broken:
        raise RuntimeError(f"a worker broke after {len(lines)} cases")
    results = sorted((json.loads(line) for line in lines), key=lambda result: result[0])
    slow = sorted(((seconds, number) for number, _, seconds in results), reverse=True)[:10]
    print("slowest:", ", ".join(f"{cases[number]} {seconds:.1f} s" for seconds, number in slow))
    return [Failure(*found) for _, all_found, _ in results for found in all_found], [number for number, *_ in results]


def _print_mended(failures: Sequence[Failure], kinds: Sequence[str]) -> None:
    """Print what is known to fail, and doesn't any more."""
    said = [(failure.scenario, failure.fault.split("@")[0], failure.property) for failure in failures]
    for key, why in KNOWN.items():
        is_seen = any(all(map(fnmatch, words, key)) for words in said)
        if not is_seen and any(fnmatch(kind, key[1]) for kind in (*kinds, "planted")):
            print(f"no longer fails, so take it out of known.py: {key}: {why}")


def _reason(failure: Failure) -> str | None:
    """Return why a failure is tolerated."""
    said = (failure.scenario, failure.fault.split("@")[0], failure.property)
    return next((why for key, why in KNOWN.items() if all(map(fnmatch, said, key))), None)


def _tell(cases: Sequence[Case], done: list[int], failures: list[Failure], report: Path | None, seconds: float) -> int:
    counts = Counter(cases[number].fault.kind for number in done)
    print(f"{len(done)} of {len(cases)} cases in {seconds:.0f} s:")
    for kind, words in KINDS.items():
        if counts[kind]:
            failed = len(
                {(failure.scenario, failure.fault) for failure in failures if failure.fault.startswith(f"{kind}@")}
            )
            print(f"  {counts[kind]:5} {kind:9} {words}; {failed} with a failure")
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault((failure.scenario, failure.fault.split("@")[0], failure.property), []).append(failure)
    for new in (False, True):
        chosen = {key: found for key, found in groups.items() if (_reason(found[0]) is None) == new}
        if chosen:
            print("NEW FAILURES" if new else "known failures")
        for (scenario, kind, name), found in sorted(chosen.items()):
            first = found[0]
            print(f"  {scenario} {kind} {name} ({PROPERTIES[name]}): {len(found)} times, first at {first.fault}")
            if new:
                print(f"      before {first.change}\n      {first.detail}")
    if report is not None:
        report.write_text(json.dumps(_summary(len(cases), counts, failures, seconds), indent=2) + "\n")
    return 1 if any(_reason(failure) is None for failure in failures) else 0


def _summary(cases: int, counts: Counter[str], failures: list[Failure], seconds: float) -> dict[str, Any]:
    """Return what a run found, with the code and machine that it was found on."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "seconds": round(seconds),
        "cases": cases,
        "run": sum(counts.values()),
        "kills": counts["kill"] + counts["kill-one"],
        "half_writes": counts["half"],
        "full_disks": counts["full"],
        "races": counts["hold"],
        "clocks": counts["clock"],
        "planted": len(PLANTED),
        "failures": [failure._asdict() | {"known": _reason(failure)} for failure in failures],
    }


if __name__ == "__main__":
    raise SystemExit(main())
