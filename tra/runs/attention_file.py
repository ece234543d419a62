"""Read attend.npz, in which `tra attend` keeps what a run attends to on one sequence."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LEVELS = 63
"""Steps of a stored weight between 0 and 1: enough for the eye, and few enough to compress well."""


class AttentionMaps(NamedTuple):
    """A window of the attention of some layers and heads: R queries, C keys. The .npz has these arrays by name."""

    symbols: npt.NDArray[np.str_]  # [C], the tokens of the keys
    row_symbols: npt.NDArray[np.str_]  # [R], the tokens of the queries
    rows: npt.NDArray[np.int64]  # [R], positions of the queries in the sequence
    columns: npt.NDArray[np.int64]  # [C], positions of the keys
    marked: npt.NDArray[np.int64]  # positions of the queries at which an answer is due
    layers: npt.NDArray[np.int64]  # [L]
    heads: npt.NDArray[np.int64]  # [H]
    weights: npt.NDArray[np.uint8]  # [L, H, R, C]: 0 is not seen or dropped, 1 … 64 by the square root
    content: npt.NDArray[np.float16]  # [L, H, R, C]: scores before position, 0 where a key is not seen
    distances: npt.NDArray[np.uint16]  # [L, H, R, C]: of TRA kept keys from j to i, else i - j + 1; 0 where not kept
    null: npt.NDArray[np.bool_]  # [L, H, R]: queries that keep no key of the whole sequence, shown or not
    mechanism: str
    title: str


def read_attention(path: Path) -> AttentionMaps:
    """Return the maps of a file of `tra attend`, with the shapes that figures rely on checked."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: tra attend makes it")
    try:
        with np.load(path) as arrays:
            found: dict[str, Any] = {name: arrays[name] for name in AttentionMaps._fields}
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a file of tra attend: {error}") from None
    maps = AttentionMaps(**found | {name: str(found[name]) for name in ("mechanism", "title")})
    shape = tuple(len(part) for part in (maps.layers, maps.heads, maps.rows, maps.columns))
    for name, expected in (("weights", shape), ("content", shape), ("distances", shape), ("null", shape[:3])):
        if found[name].shape != expected:
            raise ValueError(f"{path} is damaged: its {name} are {found[name].shape}, expected {expected}")
    return maps


def weights_of(stored: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return stored weights as numbers, NaN where a key was not seen or dropped."""
    weights = np.square((stored.astype(np.float32) - 1) / LEVELS)
    return np.where(stored == 0, np.float32(np.nan), weights)
