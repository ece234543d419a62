"""Make token stores from sources: all of them or, whatever happens, none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tra.runs import clear_folder_beside, locked_folder_beside, replace_folder
from tra.text.encode import encode_parts
from tra.text.sources import Source, find_sources
from tra.text.store import FILES, SPLITS, StoreWriter
from tra.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with the name of a store, the bytes read for it so far, and those of all its sources (0 if unknown)."""


class NoSpaceError(Exception):
    """The disk is full. Nothing was left behind."""


def prepare(
    sources: Sequence[str | Path],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    format: str = "auto",
    jobs: int | None = None,
    hold_out: int = 0,
    overwrite: bool = False,
    progress: Progress = lambda *_: None,
) -> dict[str, dict[str, Any]]:
    """Make the store `folder`, and return its manifest by its path.

    A source with splits (a WikiText folder, a dataset of the hub) becomes the stores folder/train, folder/valid and
    folder/test.

    Args:
        jobs: Threads that encode; one per core by default. The bytes of a store don't depend on it.
        hold_out: Documents at the end that become folder/valid; the rest becomes folder/train.
        overwrite: Replace the store that is in the folder.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if hold_out < 0:
        raise ValueError(f"hold_out must not be negative, got {hold_out}")
    folder = Path(folder)
    target = folder.resolve()
    clear_folder_beside(target, "preparing")
    _check_target(target, overwrite)
    splits = find_sources(sources, format)
    if hold_out and len(splits) > 1:
        raise ValueError(f"{sources[0]} has splits of its own ({', '.join(splits)}), so there is nothing to hold out")
    jobs = jobs or _count_cores()
    manifests: dict[str, dict[str, Any]] = {}
    try:
        with locked_folder_beside(target, "preparing", "prepared") as temporary:
            for name, found in splits.items():
                store = temporary / "store" / ("train" if hold_out else name)
                store.parent.mkdir(exist_ok=True)
                held_out = (hold_out, temporary / "store" / "valid") if hold_out else None
                label = name or target.name
                written = _write_store(
                    found, store, tokenizer, jobs, held_out, lambda *done, label=label: progress(label, *done)
                )
                manifests |= {str(folder / path.relative_to(temporary / "store")): facts for path, facts in written}
            _check_target(target, overwrite)  # another process may have made it meanwhile
            replace_folder(temporary / "store", target, temporary)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            message = f"the disk is full ({error.strerror}), writing {folder}; nothing is left of it"
            raise NoSpaceError(message) from None
        raise ValueError(f"{error.filename or folder}: {error.strerror}") from None
    return manifests


def _write_store(
    sources: list[Source],
    folder: Path,
    tokenizer: Tokenizer,
    jobs: int,
    held_out: tuple[int, Path] | None,
    progress: Callable[[int, int], None],
) -> list[tuple[Path, dict[str, Any]]]:
    """Write a store, and one of `held_out` documents if asked; return their folders and manifests."""
    total = sum(source.size for source in sources)
    read = 0

    def report(count: int) -> None:
        nonlocal read
        read += count
        progress(read, total)

    parts = (part for source in sources for part in source.parts(tokenizer, report))
    with StoreWriter(folder, tokenizer) as writer, contextlib.closing(encode_parts(parts, tokenizer, jobs)) as encoded:
        for part in encoded:
            writer.add(part)
        facts = [fact for source in sources for fact in source.facts()]
        names = ", ".join(fact["name"] for fact in facts)
        if not writer.documents:
            raise ValueError(f"{names}: there is no text in it" if len(facts) == 1 else f"no text in any of {names}")
        if held_out is None:
            return [(folder, writer.seal(facts))]
        count, held_out_folder = held_out
        if count >= writer.documents:
            raise ValueError(f"can't hold out {count:,} of {writer.documents:,} documents: none would be left")
        with StoreWriter(held_out_folder, tokenizer) as other:
            writer.move_last(count, other)
            return [(folder, writer.seal(facts)), (held_out_folder, other.seal(facts))]


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_target(folder: Path, overwrite: bool) -> None:
    """Raise a ValueError if a folder has anything but stores, or has stores and `overwrite` is not set."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{folder} exists already: use --overwrite to replace it")
    if (other := _other_content(folder)) is not None:
        raise ValueError(f"{folder} is not only a token store ({other} is in it), so it is not overwritten")


def _other_content(folder: Path) -> str | None:
    """Return the name of something in the folder, or of the folder, that `prepare` did not make."""
    if not folder.is_dir():
        return folder.name
    stores = [folder] if (folder / FILES[0]).exists() else [folder / path.name for path in sorted(folder.iterdir())]
    for store in stores:
        if store != folder and store.name not in SPLITS:
            return store.name
        try:
            json.loads((store / FILES[0]).read_text())["tokenizer"]["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            return store.name
        for file in sorted(store.iterdir()):
            if file.name not in FILES:
                return file.name
    return None
