"""Make a folder beside its place, and let it take the place of an old one, which is never lost meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tra.runs.files import flush_folder, is_same_file

REPLACED = "replaced"
"""Where an old folder lies for a moment, if two folders can't be exchanged in one step."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def locked_folder_beside(folder: Path, doing: str, done: str) -> Iterator[Path]:
    """Yield an empty, locked folder beside `folder`, to build its content in and move it from there.

    Files that a killed process left there are removed first. The folder itself is removed at the end.

    Args:
        doing: End of the folder's name, such as "preparing".
        done: Word for the error of a second process, such as "prepared".
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = _place_beside(folder, doing)
    with contextlib.suppress(FileExistsError):
        place.mkdir()
    with _locked(place) as is_ours:
        if not is_ours:
            raise ValueError(f"{folder} is being {done} by another process")
        try:
            _restore(folder, place)
            for path in list(place.iterdir()):
                _remove(path)
            yield place
        finally:
            _restore(folder, place)
            shutil.rmtree(place, ignore_errors=True)


def clear_folder_beside(folder: Path, doing: str) -> None:
    """Remove what a killed process left in its `locked_folder_beside`, and put an old folder back that it had moved."""
    place = _place_beside(folder, doing)
    if not place.is_symlink() and place.is_dir():
        with _locked(place) as is_ours:
            if is_ours:
                _restore(folder, place)
                shutil.rmtree(place, ignore_errors=True)


def clear_folders_beside(parent: Path, *doing: str) -> None:
    """Call `clear_folder_beside` for every folder in `parent`, also for those that were never finished."""
    for word in doing:
        for place in parent.glob(f".*.{word}"):
            clear_folder_beside(parent / place.name[1 : -len(word) - 1], word)


@contextlib.contextmanager
def new_locked_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new, locked folder in `parent`, whose name can't be guessed. It is removed at the end."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with _locked(folder) as is_ours:
            if is_ours:
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return


def remove_unlocked_folder(folder: Path) -> None:
    """Remove what a killed process left of its `new_locked_folder`. Links are not followed."""
    if not folder.is_symlink() and folder.is_dir():
        with _locked(folder) as is_ours:
            if is_ours:
                shutil.rmtree(folder, ignore_errors=True)


def replace_folder(new: Path, folder: Path, place: Path) -> None:
    """Move `new`, which lies in the locked `place`, to `folder`. What was there is then somewhere in `place`.

    At any moment, the old or the new folder is at `folder`, or the next process puts the old one back.
    """
    if not folder.exists():
        new.rename(folder)
    elif not _exchange(new, folder):
        folder.rename(place / REPLACED)
        new.rename(folder)
    flush_folder(folder.parent)


def _place_beside(folder: Path, doing: str) -> Path:
    return folder.with_name(f".{folder.name}.{doing}")


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[bool]:
    """Lock a folder, and yield whether no other process has. A link, or a file, is refused."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # removed by a process that ended this moment
        yield False
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise ValueError(f"{place} is in the way: it is a link or a file, not a folder of tra") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = is_same_file(descriptor, place)
        except BlockingIOError:
            is_ours = False
        yield is_ours
    finally:
        os.close(descriptor)


def _restore(folder: Path, place: Path) -> None:
    """Put an old folder back, if it was moved away and nothing took its place."""
    if (place / REPLACED).is_dir() and not folder.exists():
        (place / REPLACED).rename(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; return whether this system can do that."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        return False
    raise OSError(number, os.strerror(number), str(other))
