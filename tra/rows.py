"""JSON lines: how metrics and evaluations are written down and read."""

from __future__ import annotations

import json
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
