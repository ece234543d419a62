"""Read the attention maps of runs, and cut them to what a page can carry, as base64 of their bytes."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tra.report.head_ranking import top_heads
from tra.report.runs import EvaluatedRun, Problem, one_line
from tra.runs import AttentionMaps, RunFolder, read_attention

CELLS = ("weights", "content", "distances", "uncounted")
"""Names of the arrays that have a number for every query and key."""

MAX_MAPS = 12
WINDOWS = (96, 64, 48, 32)
"""Most queries and keys of a map: the first of these with which all maps fit."""

MAX_BYTES = 6_000_000
"""Largest size of all maps together, before base64."""

BYTES_PER_CELL = 5
"""Bytes of weight, score and distance. A sixth marks keys that stay without counting, if there are any."""


def read_maps(runs: Sequence[EvaluatedRun]) -> tuple[dict[str, AttentionMaps], list[Problem]]:
    """Return the maps of those runs that have some, by the run's name, and the files that are damaged."""
    found: dict[str, AttentionMaps] = {}
    problems: list[Problem] = []
    for run in runs:
        file = RunFolder(Path(run.name)).attention_file
        if file.is_file():
            try:
                maps = read_attention(file)
                if maps.weights.size == 0 or (len(maps.row_symbols), len(maps.symbols)) != maps.weights.shape[2:]:
                    raise ValueError(f"{file.name} is damaged: a symbol is due for every query and key")
                found[run.name] = maps
            except (ValueError, OSError) as error:
                why = f"its attention maps are left out: {one_line(error)}"
                problems.append(Problem(run.name, why, whole=False))
    return found, problems


def fit_maps(maps: dict[str, AttentionMaps]) -> tuple[dict[str, AttentionMaps], str]:
    """Return the first maps that fit on a page, cut alike, and what was left out, in words."""
    first = dict(itertools.islice(maps.items(), MAX_MAPS))
    for window in WINDOWS:
        cut = {name: _cut(map_, window) for name, map_ in first.items()}
        if sum(map(_bytes, cut.values())) <= MAX_BYTES:
            break
    kept: dict[str, AttentionMaps] = {}
    for name, map_ in cut.items():
        if _bytes(map_) + sum(map(_bytes, kept.values())) <= MAX_BYTES:
            kept[name] = map_
    notes = []
    if len(kept) < len(maps):
        notes.append(f"{len(kept)} of {len(maps)} runs with maps are shown")
    if any(max(len(map_.rows), len(map_.columns)) > window for map_ in first.values()):
        notes.append(f"of a larger map only the last {window} queries and the last {window} keys that they see")
    return kept, f"To keep the page small, {', and '.join(notes)}." if notes else ""


def encode_maps(maps: AttentionMaps) -> dict[str, Any]:
    """Return maps as a JSON-able value."""
    shown = set(maps.rows.tolist())
    lists = ("layers", "heads", "rows", "columns", "row_symbols", "symbols")
    return {
        "title": maps.title,
        "topHead": list(top_heads(maps, 1)[0]),
        **{name: getattr(maps, name).tolist() for name in lists},
        "marked": [position for position in maps.marked.tolist() if position in shown],
        "weights": _base64(maps.weights, "u1"),
        "content": _base64(maps.content, "<f2"),
        "distances": _base64(maps.distances, "<u2"),
        "uncounted": _base64(maps.uncounted, "u1") if maps.uncounted.any() else "",
        "null": _base64(maps.null, "u1"),
    }


def _cut(maps: AttentionMaps, size: int) -> AttentionMaps:
    """Keep the last queries, and the last keys that they see."""
    rows = slice(max(0, len(maps.rows) - size), None)
    end = max(1, int((maps.columns <= maps.rows[-1]).sum()))
    columns = slice(max(0, end - size), end)
    cells = {name: getattr(maps, name)[:, :, rows, columns] for name in CELLS}
    return maps._replace(
        rows=maps.rows[rows],
        row_symbols=maps.row_symbols[rows],
        columns=maps.columns[columns],
        symbols=maps.symbols[columns],
        null=maps.null[:, :, rows],
        **cells,
    )


def _bytes(maps: AttentionMaps) -> int:
    return maps.weights.size * (BYTES_PER_CELL + bool(maps.uncounted.any()))


def _base64(array: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()
