"""Measure how much of a text is also in the training text: the share of its runs of 32 tokens, in all and by document.

One pass over the training text finds candidates by rolling 64-bit hashes; these are then compared token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import command
from tra.runs import environment
from tra.text.store import TokenStore

LENGTH = 32
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 2**22
_FILTER_BITS = np.uint64(24)

Hashes = npt.NDArray[np.uint64]


def hash_windows(tokens: npt.NDArray[Any], length: int = LENGTH) -> Hashes:
    """Return a hash of every run of `length` tokens, indexed by where the run starts."""
    count = max(0, len(tokens) - length + 1)
    found = np.zeros(count, np.uint64)
    for place in range(length):
        found *= _FACTOR
        found += tokens[place : place + count].astype(np.uint64) + np.uint64(1)
    return found


def windows_of_documents(store: TokenStore, length: int = LENGTH) -> Iterator[npt.NDArray[Any]]:
    """Yield, for each document, the starts of its runs of `length` tokens. No run contains the separator."""
    starts = [*store.documents[:, 0].tolist(), len(store.tokens)]
    for begin, end in itertools.pairwise(starts):
        yield np.arange(begin + 1, max(begin + 1, end - length + 1))


def find_overlap(train: TokenStore, held_out: TokenStore, length: int = LENGTH) -> list[tuple[int, int]]:
    """Return, for each document of `held_out`, how many of its runs are also in `train`, and how many runs it has."""
    own = hash_windows(held_out.tokens, length)
    wanted = np.unique(own)
    possible = np.zeros(1 << int(_FILTER_BITS), bool)
    possible[wanted >> (np.uint64(64) - _FILTER_BITS)] = True
    seen: set[bytes] = set()
    for begin in range(0, len(train.tokens), _CHUNK):
        tokens = train.tokens[begin : begin + _CHUNK + length - 1]
        hashes = hash_windows(tokens, length)
        places = np.flatnonzero(possible[hashes >> (np.uint64(64) - _FILTER_BITS)])
        near = np.searchsorted(wanted, hashes[places]).clip(max=len(wanted) - 1)
        for place in places[wanted[near] == hashes[places]]:
            seen.add(tokens[place : place + length].tobytes())
    found = []
    for starts in windows_of_documents(held_out, length):
        shared = sum(held_out.tokens[start : start + length].tobytes() in seen for start in starts)
        found.append((shared, len(starts)))
    return found


def measure(train: TokenStore, held_out: TokenStore) -> dict[str, Any]:
    """Return the share over all documents, and the documents with the largest shares."""
    by_document = find_overlap(train, held_out)
    shared, runs = (sum(column) for column in zip(*by_document, strict=True))
    shares = sorted(((part / of, number) for number, (part, of) in enumerate(by_document) if part), reverse=True)
    return {
        "text": held_out.name,
        "training text": train.name,
        "tokens in a run": LENGTH,
        "runs": runs,
        "share": round(shared / runs, 5),
        "documents": len(by_document),
        "documents without any": sum(part == 0 for part, _ in by_document),
        "most by document": [{"document": number, "share": round(share, 4)} for share, number in shares[:6]],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("text_overlap", __doc__)
    parser.add_argument("train", type=Path, help="the store that models were trained on")
    parser.add_argument("held_out", type=Path, nargs="+", help="stores that they are measured on")
    options = parser.parse_args(arguments)
    train, held_out = TokenStore.open(options.train), [TokenStore.open(path) for path in options.held_out]
    if any(store.fingerprint != train.fingerprint for store in held_out):
        raise ValueError("the stores were made with different tokenizers")
    rows = [measure(train, store) for store in held_out]
    command.show({"environment": environment(command.pick_device("cpu")), "rows": rows}, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
