"""Lock a run folder, so that one process at a time writes to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tra.runs.files import is_same_file

LOCK = "lock"
"""Name of the file that is locked. It stays when the lock is released; it is no result of the run."""

POLL_SECONDS = 0.1


class LockedError(ValueError):
    """Another process writes to the folder."""


class _Lock:
    """A lock that this process holds, and how many contexts hold it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.holders = descriptor, 1


_guard = threading.Lock()
_held: dict[tuple[int, Path], _Lock] = {}  # by process, since a forked one doesn't hold its parent's


@contextlib.contextmanager
def folder_lock(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock of an existing folder, which this process may hold already.

    The operating system releases it when the process ends, however that happens. Where the file system has no locks,
    nothing is held.

    Args:
        wait: Seconds after which another process's lock is a LockedError.
    """
    key = os.getpid(), folder.resolve()
    deadline = time.monotonic() + wait
    while not _acquire(key):
        if time.monotonic() >= deadline:
            raise LockedError(f"{folder} is being written by another process")
        time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        with _guard:
            lock = _held[key]
            lock.holders -= 1
            if lock.holders == 0:
                del _held[key]
                os.close(lock.descriptor)


def _acquire(key: tuple[int, Path]) -> bool:
    """Take the lock, and return whether no other process has it."""
    file = key[1] / LOCK
    with _guard:
        if key in _held:
            _held[key].holders += 1
            return True
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = is_same_file(descriptor, file)  # else the folder was replaced meanwhile
        except BlockingIOError:
            is_ours = False
        except OSError:  # a file system without locks
            is_ours = True
        if is_ours:
            _held[key] = _Lock(descriptor)
        else:
            os.close(descriptor)
        return is_ours
