"""Write files and folders whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that it always holds either its old content or the new one.

    The content is written beside the file, flushed to the disk, and then moved there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_arrays(file: Path, arrays: dict[str, Any]) -> None:
    """Write a compressed .npz atomically. Equal arrays give equal bytes."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(file, content.getvalue())


@contextlib.contextmanager
def locked_folder_beside(folder: Path, doing: str, done: str) -> Iterator[Path]:
    """Yield an empty, locked folder beside `folder`, to build its content in and move it from there.

    What a killed process left there is removed first. The folder itself is removed at the end.

    Args:
        doing: Ends the name of the folder, as in "preparing".
        done: Tells a second process why it is refused, as in "prepared".
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
