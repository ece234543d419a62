"""A token store is a folder: manifest.json, tokens.bin, documents.npy. Equal sources give equal bytes.

tokens.bin is one stream of little-endian ids, with the separator before each document, the first one too.
documents.npy is int64 [D, 3]: index of the document's separator, bytes of text, words of text (-1: unknown).
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tra.runs import UNREADABLE_ARRAYS
from tra.text.tokenizer import Tokenizer

FORMAT = 1
"""Version of the layout; a store of a later version is refused."""

VERIFIED_BYTES = 2**30
"""Size of files up to which their checksum is verified whenever a store is opened."""

SPLITS = ("train", "valid", "test")
"""Names of the stores of one corpus."""

FILES = ("manifest.json", "tokens.bin", "documents.npy")
_BLOCK = 2**20


class TokenPart(NamedTuple):
    """A document, or the next part of one, as ids."""

    begins: bool
    """A document starts here. The separator before it is not among the ids."""
    ids: npt.NDArray[Any]
    bytes: int
    words: int


class TokenStore:
    """An existing store, memory-mapped: `tokens` [N], `documents` [D, 3]."""

    tokens: npt.NDArray[Any]
    documents: npt.NDArray[np.int64]
    manifest: dict[str, Any]

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        full = path.resolve()
        self.name = f"{full.parent.name}-{full.name}" if full.name in SPLITS else full.name
        self.manifest = manifest
        self.tokenizer_name: str = manifest["tokenizer"]["name"]
        self.fingerprint: str = manifest["tokenizer"]["fingerprint"]
        self.separator: int = manifest["tokenizer"]["separator"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]

    @classmethod
    def open(cls, path: str | Path, verify: bool | None = None) -> TokenStore:
        """Open a store. Sizes are always checked; checksums if `verify`, or if it is None in files below 1 GiB."""
        path = Path(path)
        store = cls(path, _read_manifest(path))
        tokens, documents = path / "tokens.bin", path / "documents.npy"
        for file in (tokens, documents):
            if not file.is_file():
                raise ValueError(f"{path} is damaged: {file.name} is missing")
        try:
            dtype = np.dtype(store.manifest["dtype"])
            expected = store.manifest["tokens"] * dtype.itemsize
            if type(expected) is not int:
                raise TypeError(f"its number of tokens is a {type(expected).__name__}")
            if tokens.stat().st_size != expected:
                size = tokens.stat().st_size
                raise ValueError(f"{tokens} is damaged: {size:,} bytes instead of {expected:,}")
            try:
                store.documents = np.load(documents, mmap_mode="r")
            except UNREADABLE_ARRAYS as error:
                raise ValueError(f"{documents} is damaged: {' '.join(str(error).split())}") from None
            shape = (store.manifest["documents"], 3)
            if store.documents.shape != shape or store.documents.dtype != np.int64:
                raise ValueError(f"{documents} is damaged: shape {store.documents.shape} instead of {shape}")
            _check_documents(documents, store.documents, store.manifest["tokens"])
            for file in (tokens, documents):
                wanted = verify if verify is not None else file.stat().st_size < VERIFIED_BYTES
                if wanted and digest(file) != store.manifest["sha256"][file.name]:
                    raise ValueError(f"{file} is damaged: its contents don't match the manifest's checksum")
        except KeyError as error:
            raise ValueError(f"{path / 'manifest.json'} is damaged: it has no {error}") from None
        except (TypeError, AttributeError) as error:  # values of other types than a store's
            raise ValueError(f"{path / 'manifest.json'} is damaged: {error}") from None
        store.tokens = np.memmap(tokens, dtype=dtype, mode="r")
        return store


class StoreWriter:
    """Writes a store document by document. It is complete only after `seal`."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        folder.mkdir()
        self.folder = folder
        self.tokenizer = tokenizer
        self._table = array("q")  # documents.npy, row after row
        self._length = 0
        self._file = (folder / "tokens.bin").open("w+b")
        self._separator = np.array([tokenizer.separator], dtype=tokenizer.dtype).tobytes()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def documents(self) -> int:
        return len(self._table) // 3

    def add(self, part: TokenPart) -> None:
        if part.begins:
            self._table.extend((self._length, 0, 0))
            self._file.write(self._separator)
            self._length += 1
        self._file.write(part.ids.astype(self.tokenizer.dtype, copy=False).tobytes())
        self._length += len(part.ids)
        self._table[-2] += part.bytes
        self._table[-1] = -1 if part.words < 0 else self._table[-1] + part.words

    def move_last(self, count: int, other: StoreWriter) -> None:
        """Move the last documents to another, empty store."""
        assert 0 < count < self.documents
        assert not other.documents
        rows = self._table[-3 * count :]
        start, width = rows[0], self.tokenizer.dtype.itemsize
        self._file.seek(start * width)
        while block := self._file.read(_BLOCK):
            other._file.write(block)
        rows_from_zero = np.array(rows, dtype=np.int64).reshape(count, 3) - np.array([start, 0, 0])
        other._table, other._length = array("q", rows_from_zero.ravel().tolist()), self._length - start
        self._file.truncate(start * width)
        self._table, self._length = self._table[: -3 * count], start

    def seal(self, sources: list[dict[str, Any]]) -> dict[str, Any]:
        """Write table and manifest, flush all files to the disk, and return the manifest."""
        table = np.array(self._table, dtype=np.int64).reshape(-1, 3)
        tokens, documents = self.folder / "tokens.bin", self.folder / "documents.npy"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with documents.open("wb") as file:
            np.save(file, table)
            file.flush()
            os.fsync(file.fileno())
        manifest = {
            "format": FORMAT,
            "tokenizer": {
                "name": self.tokenizer.name,
                "fingerprint": self.tokenizer.fingerprint,
                "vocab_size": self.tokenizer.vocab_size,
                "separator": self.tokenizer.separator,
            },
            "documents": len(table),
            "words": int(table[:, 2].sum()) if (table[:, 2] >= 0).all() else None,
            "bytes": int(table[:, 1].sum()),
            "tokens": self._length,
            "dtype": self.tokenizer.dtype.name,
            "sha256": {file.name: digest(file) for file in (tokens, documents)},
            "sources": sources,
        }
        with (self.folder / "manifest.json").open("w") as text:
            text.write(json.dumps(manifest, indent=2) + "\n")
            text.flush()
            os.fsync(text.fileno())
        return manifest


def _check_documents(file: Path, table: npt.NDArray[np.int64], tokens: int) -> None:
    """Check that documents begin at 0, one after another, and within the stream. Looks at a part of them at a time."""
    last = -1
    for start in range(0, len(table), _BLOCK):
        begins = table[start : start + _BLOCK, 0]
        if (begins <= np.concatenate([[last], begins[:-1]])).any() or begins[-1] >= tokens or table[0, 0] != 0:
            raise ValueError(f"{file} is damaged: its documents don't follow one another within {tokens:,} tokens")
        last = begins[-1]


def digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"there is no token store {path}; tra prepare makes one")
    file = path / "manifest.json"
    if not file.is_file():
        inside = sorted(found.parent.name for found in path.glob("*/manifest.json")) if path.is_dir() else []
        hint = f"; it holds the stores {', '.join(inside)}: name one" if inside else ""
        raise ValueError(f"{path} is not a token store (no manifest.json in it){hint}")
    damaged = f"{file} is damaged, or not that of a token store"
    try:
        manifest: dict[str, Any] = json.loads(file.read_text())
    except (ValueError, RecursionError):
        raise ValueError(damaged) from None
    try:
        version = manifest["format"]
        if version > FORMAT:
            raise ValueError(f"{path} is a store of format {version}, this version of tra reads up to {FORMAT}")
        if not {"name", "fingerprint", "separator", "vocab_size"} <= manifest["tokenizer"].keys():
            raise KeyError("tokenizer")
    except (KeyError, TypeError, AttributeError):
        raise ValueError(damaged) from None
    return manifest
