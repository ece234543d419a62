"""Read attend.npz, in which `tra attend` keeps what a run attends to on one sequence."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tra.runs.files import UNREADABLE_ARRAYS

LEVELS = 63
"""Steps of a stored weight between 0 and 1: enough for the eye, and few enough to compress well."""

MAX_BYTES = 512 * 2**20
"""Most that the arrays of a file may take in memory: a small file can hold zeros without end."""

ARRAYS = dict.fromkeys(("symbols", "row_symbols"), ("U", 1))
ARRAYS |= dict.fromkeys(("rows", "columns", "marked", "layers", "heads"), ("iu", 1))
ARRAYS |= {"weights": ("u", 4), "content": ("f", 4), "distances": ("u", 4), "uncounted": ("b", 4), "null": ("b", 3)}
ARRAYS |= {"mechanism": ("U", 0), "title": ("U", 0)}
"""Kinds of dtype and number of dimensions of each array."""


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
    distances: npt.NDArray[np.uint16]  # [L, H, R, C]: n_ij of TRA, else i - j + 1; 0 where not kept
    uncounted: npt.NDArray[np.bool_]  # [L, H, R, C]: keys inside TRA's margin, which stay without counting as distance
    null: npt.NDArray[np.bool_]  # [L, H, R]: queries that keep no key of the whole sequence, shown or not
    mechanism: str  # with its threshold and margin, as named by `variant_of`
    title: str


def read_attention(path: Path) -> AttentionMaps:
    """Return the maps of a file of `tra attend`, with the shapes that figures rely on checked."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: tra attend makes it")
    try:
        _check_headers(path)
        with np.load(path) as arrays:
            found: dict[str, Any] = {name: arrays[name] for name in AttentionMaps._fields if name in arrays}
    except UNREADABLE_ARRAYS as error:
        raise ValueError(f"{path} is not a file of tra attend: {' '.join(str(error).split())[:300]}") from None
    found.setdefault("uncounted", np.zeros(found["weights"].shape, bool))
    maps = AttentionMaps(**found | {name: str(found[name]) for name in ("mechanism", "title")})
    shape = tuple(len(part) for part in (maps.layers, maps.heads, maps.rows, maps.columns))
    for name, (_, dimensions) in ARRAYS.items():
        expected = shape[:dimensions]
        if dimensions > 2 and found[name].shape != expected:
            raise ValueError(f"{path} is damaged: its {name} are {found[name].shape}, expected {expected}")
    return maps


def _check_headers(path: Path) -> None:
    """Check the names, types, dimensions and total size of the arrays before any is read."""
    total = 0
    with zipfile.ZipFile(path) as file:
        for name, (kinds, dimensions) in ARRAYS.items():
            if name == "uncounted" and f"{name}.npy" not in file.namelist():
                continue  # a file of a former version
            with file.open(f"{name}.npy") as stream:
                version = np.lib.format.read_magic(stream)
                if version == (1, 0):
                    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
                elif version == (2, 0):
                    shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
                else:
                    raise ValueError(f"its {name} have version {version}")
            if dtype.kind not in kinds or len(shape) != dimensions:
                raise ValueError(f"its {name} are {dtype} {shape}")
            total += math.prod(shape) * max(1, dtype.itemsize)
    if total > MAX_BYTES:
        raise ValueError(f"its arrays take {total:,} bytes, more than {MAX_BYTES:,}")


def weights_of(stored: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return stored weights as numbers, NaN where a key was not seen or dropped."""
    weights = np.square((stored.astype(np.float32) - 1) / LEVELS)
    return np.where(stored == 0, np.float32(np.nan), weights)
