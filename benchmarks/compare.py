"""Two results of a measurement, OLD and NEW, side by side; fails where the new one is 10 % worse."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import command

MEASURES = ("ms", "eager_ms", "us", "step_ms", "prefill_ms", "forward_ms", "backward_ms", "peak_mib")
OTHER_MEASURES = {
    *("fastest_ms", "slowest_ms", "times_flash", "times_sdpa", "step_ratio", "peak_ratio", "ready_after_s", "finite"),
    *("fastest_us", "slowest_us", "ratio", "tokens_per_second"),
}
WORSE_RATIO = 1.1


class Change(NamedTuple):
    """One measure of one case, before and after."""

    what: str
    measure: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        return self.new / self.old

    @property
    def is_worse(self) -> bool:
        return self.ratio > WORSE_RATIO


def read_result(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text())
        assert all(isinstance(row, dict) for row in result["rows"])
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist") from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise ValueError(f"{file} is no result of a measurement with --json") from None
    return dict(result)


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Return all measures of the cases that both have, in the order of the new one.

    Raises:
        ValueError: If they have none in common, or came from different devices.
    """
    devices = [result.get("environment", {}).get("device") for result in (old, new)]
    if devices[0] != devices[1]:
        raise ValueError(f"the two were measured on different devices: {devices[0]} and {devices[1]}")
    before = {_identity(row): row for row in old["rows"]}
    changes = [
        Change(_identity(row), name, before[_identity(row)][name], row[name])
        for row in new["rows"]
        if _identity(row) in before
        for name in MEASURES
        if row.get(name) and before[_identity(row)].get(name)
    ]
    if not changes:
        raise ValueError("the two results have no case in common")
    return changes


def _identity(row: dict[str, Any]) -> str:
    """Return all that isn't a measure, as text."""
    return ", ".join(
        str(value) if isinstance(value, str) else f"{name} {value}"
        for name, value in row.items()
        if name not in MEASURES and name not in OTHER_MEASURES and name != "error"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args(arguments)
    changes = compare(read_result(options.old), read_result(options.new))
    for change in changes:
        mark = "worse" if change.is_worse else "better" if change.ratio < 1 / WORSE_RATIO else ""
        print(f"{change.ratio:7.3f} {change.old:12,.4g} {change.new:12,.4g} {mark:6} {change.measure}: {change.what}")
    worse = sum(change.is_worse for change in changes)
    print(f"{worse} of {len(changes)} are more than 10 % worse")
    return 1 if worse else 0


if __name__ == "__main__":
    command.run(main)
