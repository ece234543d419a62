"""Read a dataset of the Hugging Face hub: hub:Salesforce/wikitext:wikitext-103-raw-v1."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from tra.runs.failures import pip_install

PREFIX = "hub:"
_SPLITS = {"train": "train", "validation": "valid", "valid": "valid", "test": "test"}


class HubSplit:
    """Rows of one split, as lines of text, with the size and checksum of what was read so far."""

    def __init__(self, name: str, rows: Any) -> None:
        self.name = name
        self.size = 0
        self._rows = rows
        self._digest = hashlib.sha256()

    def texts(self, report: Callable[[int], None]) -> Iterator[str]:
        self._digest, self.size = hashlib.sha256(), 0
        for row in self._rows:
            # The dataset gives WikiText's blank lines, a space and a newline, as empty rows.
            text = row["text"] or " \n"
            raw = text.encode()
            self._digest.update(raw)
            self.size += len(raw)
            report(len(raw))
            yield text

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.size, "sha256": self._digest.hexdigest()}


def hub_splits(source: str) -> dict[str, HubSplit]:
    """Return the splits of a dataset by the names that stores have."""
    dataset, _, config = source.removeprefix(PREFIX).partition(":")
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        command = pip_install("datasets")
        raise ValueError(f"{source} needs the datasets library: {command}, or give a local folder") from None
    try:
        found = load_dataset(dataset, config or None)
    except Exception as error:  # the library raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{source} can't be loaded: {reason}") from None
    splits = {
        ours: HubSplit(f"{source}:{theirs}", found[theirs]) for theirs, ours in _SPLITS.items() if theirs in found
    }
    if not splits or any("text" not in found[theirs].column_names for theirs in _SPLITS if theirs in found):
        raise ValueError(f"{source} has no splits of rows with a text")
    return splits
