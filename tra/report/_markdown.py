"""Tables of the pages."""

from __future__ import annotations

from collections.abc import Sequence


def table_header(corner: str, columns: Sequence[str]) -> list[str]:
    return [table_row(corner, columns), "|" + "---|" * (len(columns) + 1)]


def table_row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"
