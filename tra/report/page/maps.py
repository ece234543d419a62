"""Attention maps on the page: files of `tra attend`, cut to what a page can carry, as base64 of their bytes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tra.runs import AttentionMaps

MOST_MAPS = 12
WINDOWS = (96, 64, 48, 32)
"""Queries and keys of a map at most: the first of these with which all maps fit."""

MOST_BYTES = 6_000_000
"""Of all maps together, before base64."""


def fitted(maps: Sequence[AttentionMaps]) -> tuple[list[AttentionMaps | None], str]:
    """Every map, cut alike, or None where it doesn't fit any more; and what was left out, in words."""
    window = next((w for w in WINDOWS if sum(_bytes(_cut(m, w)) for m in maps[:MOST_MAPS]) <= MOST_BYTES), WINDOWS[-1])
    kept: list[AttentionMaps | None] = []
    left = MOST_BYTES
    for number, attended in enumerate(maps):
        cut = _cut(attended, window) if number < MOST_MAPS else None
        kept.append(cut if cut is not None and _bytes(cut) <= left else None)
        left -= 0 if kept[-1] is None else _bytes(kept[-1])
    notes = []
    if None in kept:
        notes.append(f"{len(kept) - kept.count(None)} of {len(maps)} runs with maps are shown")
    if any(max(len(attended.rows), len(attended.columns)) > window for attended in maps[:MOST_MAPS]):
        notes.append(f"of a larger map only the last {window} queries and the last {window} keys that they see")
    return kept, f"To keep the page small, {', and '.join(notes)}." if notes else ""


def encoded(attended: AttentionMaps) -> dict[str, Any]:
    """JSON-able."""
    shown = set(attended.rows.tolist())
    return {
        "title": attended.title,
        "layers": attended.layers.tolist(),
        "heads": attended.heads.tolist(),
        "rows": attended.rows.tolist(),
        "columns": attended.columns.tolist(),
        "row_symbols": attended.row_symbols.tolist(),
        "symbols": attended.symbols.tolist(),
        "marked": [place for place in attended.marked.tolist() if place in shown],
        "weights": _base64(attended.weights, "u1"),
        "content": _base64(attended.content, "<f2"),
        "distances": _base64(attended.distances, "<u2"),
        "null": _base64(attended.null, "u1"),
    }


def _cut(attended: AttentionMaps, size: int) -> AttentionMaps:
    rows = slice(max(0, len(attended.rows) - size), None)
    end = max(1, int((attended.columns <= attended.rows[-1]).sum()))
    columns = slice(max(0, end - size), end)
    return attended._replace(
        rows=attended.rows[rows],
        row_symbols=attended.row_symbols[rows],
        columns=attended.columns[columns],
        symbols=attended.symbols[columns],
        null=attended.null[:, :, rows],
        weights=attended.weights[:, :, rows, columns],
        content=attended.content[:, :, rows, columns],
        distances=attended.distances[:, :, rows, columns],
    )


def _bytes(attended: AttentionMaps) -> int:
    return attended.weights.size * 5


def _base64(array: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()
