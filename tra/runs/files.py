"""Write files whole or not at all, and remove what a killed process left of them."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import stat
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

TEMPORARY = re.compile(r"\.(?P<name>.+)\.\d+\.tmp")
"""Names of files that are being written: the name of the file, and the process that writes it."""

UNREADABLE_ARRAYS = (
    ValueError,
    TypeError,
    OSError,
    EOFError,
    KeyError,
    AttributeError,
    NotImplementedError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors that NumPy raises on damaged .npy and .npz files, whose headers are Python literals and archives zip files."""


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new, open file that takes the place of `path` at the end; an error leaves `path` as it was.

    The content is written beside `path`, flushed to the disk, and then moved there.
    """
    remove_stale_files(path.parent, path.name)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with name_in_errors(path, instead_of=temporary):
        file = _open_locked(temporary)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        flush_folder(path.parent)


def open_to_append(path: Path) -> IO[bytes]:
    """Open a file to write at its end. A link is an error: it may lead out of the folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "ab")


@contextlib.contextmanager
def name_in_errors(path: Path, instead_of: Path | None = None) -> Iterator[None]:
    """Name a file in errors of writing it, which name none, or the temporary one."""
    try:
        yield
    except OSError as error:
        if error.filename in (None, str(instead_of)):
            error.filename = str(path)
        raise


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that it always holds either its old content or the new one."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_arrays(file: Path, arrays: dict[str, Any]) -> None:
    """Write a compressed .npz atomically. Equal arrays give equal bytes."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(file, content.getvalue())


def remove_stale_files(folder: Path, name: str | None = None) -> None:
    """Remove temporary files that killed processes left in a folder, of all files or of the one called `name`.

    A file that is still being written is locked by its process, and stays. Links are never followed.
    """
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        match = TEMPORARY.fullmatch(path.name)
        if match is not None and name in (None, match["name"]):
            _remove_if_unlocked(path)


def flush_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_same_file(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (opened.st_dev, opened.st_ino) == (there.st_dev, there.st_ino)


def _open_locked(path: Path) -> IO[bytes]:
    """Create a file and lock it, so that no other process takes it for a stale one."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_same_file(descriptor, path):
            return os.fdopen(descriptor, "wb")
        os.close(descriptor)  # removed as stale before it was locked


def _remove_if_unlocked(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):  # locked, or not ours to remove
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_same_file(descriptor, path):
                    path.unlink()
    finally:
        os.close(descriptor)
