"""Folders that are there whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def folder_beside(folder: Path, doing: str, done: str) -> Iterator[Path]:
    """A locked folder beside the target to make it in. What a kill left there is removed first, the rest at the end.

    Args:
        doing: As in "preparing": how the folder's name ends.
        done: As in "prepared": what whoever comes second is told.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = folder.with_name(f".{folder.name}.{doing}")
    place.mkdir(exist_ok=True)
    lock = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being {done} by another process") from None
        try:
            for path in list(place.iterdir()):
                shutil.rmtree(path)
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(lock)
