"""Reading results of measurements, and setting two of them side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

MEASURES = ("ms", "step_ms", "prefill_ms", "forward_ms", "backward_ms", "peak_mib")
OTHER_MEASURES = {
    *("fastest_ms", "slowest_ms", "times_flash", "times_sdpa", "step_ratio", "peak_ratio", "ready_after_s", "finite"),
    "tokens_per_second",
}
WORSE = 1.1


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
        return self.ratio > WORSE


def read_result(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text())
        assert all(isinstance(row, dict) for row in result["rows"])
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist") from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise ValueError(f"{file} is no result of `tra bench ... --json`") from None
    return dict(result)


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """All measures of the cases that both have, in the order of the new one.

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
    """Everything that isn't a measure."""
    return ", ".join(
        str(value) if isinstance(value, str) else f"{name} {value}"
        for name, value in row.items()
        if name not in MEASURES and name not in OTHER_MEASURES and name != "error"
    )
