"""Read and write metrics and results, which are JSON lines, and put a result into words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tra.runs.files import write_atomically
from tra.runs.locks import folder_lock
from tra.runs.row_checks import row_problem

LOCK_SECONDS = 20.0
"""Time to wait for another process that writes a row."""


def read_rows(file: Path, needed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a file; none if it doesn't exist. A last line without its end, cut by a kill, is left out.

    Any other line that is no row is a ValueError: a file that is written anew must not lose what can't be read.

    Args:
        needed: Keys that every row must have.
    """
    rows: list[dict[str, Any]] = []
    if not file.is_file():
        return rows
    lines = file.read_bytes().split(b"\n")  # the last one has no end: it is empty, or cut
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, or too long a number
            if number == len(lines):
                break
            raise ValueError(f"{file}, line {number}, is damaged: {error}") from None
        if (problem := row_problem(file.name, row, needed)) is not None:
            raise ValueError(f"{file}, line {number}, is damaged: {problem}")
        rows.append(row)
    return rows


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows atomically."""
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))


def put_row(file: Path, row: dict[str, Any], key: tuple[str, ...]) -> None:
    """Add a row, and remove an earlier one that has the same values under `key`.

    The folder is locked meanwhile, so that rows of several processes add up.
    """
    with folder_lock(file.parent, wait=LOCK_SECONDS):
        others = [other for other in read_rows(file) if any(other.get(name) != row[name] for name in key)]
        write_rows(file, [*others, row])


def exact_text(row: Mapping[str, Any]) -> str:
    """Return `0.824 (0.807-0.840)`, with more digits the more sequences were tested."""
    digits = exact_digits(row["examples"])
    return f"{row['exact']:.{digits}f} ({row['low']:.{digits}f}-{row['high']:.{digits}f})"


def exact_digits(examples: int) -> int:
    """Return how many digits of an exact match this many test sequences support."""
    return 5 if examples > 10_000 else 4 if examples > 1000 else 3


def length_text(row: Mapping[str, Any]) -> str:
    """Return `512`, or `51-100` where lengths vary."""
    return str(row["longest"]) if row["shortest"] == row["longest"] else f"{row['shortest']}-{row['longest']}"


def mean_over_heads(measure: list[list[float | None]] | None) -> float | None:
    """Return the mean of a measure `[layer][head]` over the heads that have one."""
    values = [] if measure is None else [value for heads in measure for value in heads if value is not None]
    return sum(values) / len(values) if values else None
