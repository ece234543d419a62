"""What a run attends to on one sequence, as `tra attend` keeps it: the file, and how its numbers are read."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LEVELS = 63
"""Steps between no weight and all of it: enough for the eye, and few enough to compress well."""


class Attended(NamedTuple):
    """A window of the attention of some layers and heads: R queries, C keys. An .npz has these arrays by name."""

    symbols: npt.NDArray[np.str_]  # [C], the tokens of the keys
    row_symbols: npt.NDArray[np.str_]  # [R], the tokens of the queries
    rows: npt.NDArray[np.int64]  # [R], places of the queries in the sequence
    columns: npt.NDArray[np.int64]  # [C], places of the keys
    marked: npt.NDArray[np.int64]  # places of the queries at which an answer is due
    layers: npt.NDArray[np.int64]  # [L]
    heads: npt.NDArray[np.int64]  # [H]
    weights: npt.NDArray[np.uint8]  # [L, H, R, C]: 0 is not seen or dropped, 1 … 64 by the square root
    content: npt.NDArray[np.float16]  # [L, H, R, C]: scores before position, 0 where a key is not seen
    distances: npt.NDArray[np.uint16]  # [L, H, R, C]: of TRA kept keys from j to i, else i - j + 1; 0 where not kept
    null: npt.NDArray[np.bool_]  # [L, H, R]: queries that keep no key at all, also none of those not shown
    mechanism: str
    title: str


def read_attend(path: Path) -> Attended:
    """A file of `tra attend`, checked for what a figure relies on."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: tra attend makes it")
    try:
        with np.load(path) as arrays:
            found: dict[str, Any] = {name: arrays[name] for name in Attended._fields}
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a file of tra attend: {error}") from None
    attended = Attended(**found | {name: str(found[name]) for name in ("mechanism", "title")})
    shape = tuple(len(part) for part in (attended.layers, attended.heads, attended.rows, attended.columns))
    for name, expected in (("weights", shape), ("content", shape), ("distances", shape), ("null", shape[:3])):
        if found[name].shape != expected:
            raise ValueError(f"{path} is damaged: its {name} are {found[name].shape}, expected {expected}")
    return attended


def weights_of(maps: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Bytes of maps as weights; NaN where a key was not seen or dropped."""
    weights = np.square((maps.astype(np.float32) - 1) / LEVELS)
    return np.where(maps == 0, np.float32(np.nan), weights)
