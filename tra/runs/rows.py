"""Metrics and evaluations as they are read back: JSON lines, and how a result is put into words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_rows(file: Path) -> list[dict[str, Any]]:
    """All rows of a file; none where there is no file. A last line that a kill cut short doesn't count."""
    rows: list[dict[str, Any]] = []
    if not file.is_file():
        return rows
    for line in file.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def exact_text(row: Mapping[str, Any]) -> str:
    """`0.824 (0.807-0.840)`, with as many digits as the number of sequences bears."""
    digits = 5 if row["examples"] > 10_000 else 4 if row["examples"] > 1000 else 3
    return f"{row['exact']:.{digits}f} ({row['low']:.{digits}f}-{row['high']:.{digits}f})"


def length_text(row: Mapping[str, Any]) -> str:
    """`512`, or `51-100` where lengths vary."""
    return str(row["longest"]) if row["shortest"] == row["longest"] else f"{row['shortest']}-{row['longest']}"


def mean_over_heads(measure: list[list[float | None]] | None) -> float | None:
    """Of a measure by layer and head, over those that saw anything."""
    values = [] if measure is None else [value for heads in measure for value in heads if value is not None]
    return sum(values) / len(values) if values else None
