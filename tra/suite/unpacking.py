"""Unpack an archive that isn't trusted: regular files and folders only, of bounded size."""

from __future__ import annotations

import contextlib
import gzip
import io
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from tra.runs import name_in_errors

MAX_MEMBERS = 100_000
"""Files and folders of one archive."""

MAX_UNPACKED_BYTES = 64 * 2**30
"""Size of an archive's files, all together."""

MAX_HEADER_BYTES = 2**20
"""Size of the names and attributes of one member."""

MIN_FREE_BYTES = 64 * 2**20
"""Space that is left on the disk."""

_BLOCK_BYTES = 2**20

DAMAGES = (
    tarfile.TarError,
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
    UnicodeError,
    OverflowError,
    RecursionError,
)
"""Errors that reading a damaged archive raises."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar.gz or .tar into an empty folder.

    All members are checked before the first is written. Links, devices, absolute names, `..` and sizes beyond the
    limits are a ValueError that names the member.
    """
    try:
        with _members_of(archive) as (tar, members):
            _check_members(archive, members, folder)
        with _members_of(archive) as (tar, members):
            for member in members:
                _write_member(tar, member, folder, archive)
    except DAMAGES as error:
        raise ValueError(f"{archive} is no archive of runs: {error}") from None


def is_archive_of_runs(file: Path) -> bool:
    """Return whether a file is an archive of nothing but folders, one of which is a run, or an empty archive."""
    try:
        with _members_of(file) as (_, members):
            names = [PurePosixPath(member.name) for _, member in zip(range(MAX_MEMBERS), members, strict=False)]
    except (*DAMAGES, OSError, ValueError):
        return False
    return not names or any(len(name.parts) == 2 and name.name == "config.json" for name in names)


@contextlib.contextmanager
def _members_of(archive: Path) -> Iterator[tuple[tarfile.TarFile, Iterator[tarfile.TarInfo]]]:
    with archive.open("rb") as raw:
        is_packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if is_packed else raw  # type: ignore[assignment]
        with tarfile.TarFile(fileobj=_BoundedReader(stream, archive), errorlevel=1) as tar:
            yield tar, _iterate(tar)


def _iterate(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield members one by one; unlike iterating over `tar`, without keeping those that were yielded."""
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]
        yield member


class _BoundedReader(io.RawIOBase):
    """A file of which no large part is read at once: a header can claim to be as long as the memory."""

    def __init__(self, stream: IO[bytes], archive: Path) -> None:
        self.stream, self.archive = stream, archive

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"{self.archive} is refused: a member has a header of {size:,} bytes")
        if self.stream.tell() > MAX_UNPACKED_BYTES + MAX_MEMBERS * 2048:
            raise ValueError(f"{self.archive} is refused: it is longer than {MAX_UNPACKED_BYTES:,} bytes")
        return self.stream.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self.stream.seek(offset, whence)

    def tell(self) -> int:
        return self.stream.tell()


def _check_members(archive: Path, members: Iterator[tarfile.TarInfo], folder: Path) -> None:
    """Raise a ValueError if an archive's headers are not acceptable."""
    free = shutil.disk_usage(folder).free
    count = size = 0
    for member in members:
        _target(archive, member, folder)
        count, size = count + 1, size + member.size
        if count > MAX_MEMBERS:
            raise ValueError(f"{archive} is refused: it has more than {MAX_MEMBERS:,} members, {member.name!r} is one")
        if size > MAX_UNPACKED_BYTES:
            raise ValueError(
                f"{archive} is refused: with {member.name!r} it has {size:,} bytes, more than {MAX_UNPACKED_BYTES:,}"
            )
        if size + MIN_FREE_BYTES > free:
            raise ValueError(
                f"{archive} is refused: with {member.name!r} it has {size:,} bytes, and the disk only {free:,} free"
            )


def _target(archive: Path, member: tarfile.TarInfo, folder: Path) -> Path:
    """Return where a member goes. A ValueError if it is no regular file or folder, or would leave the folder."""
    name = PurePosixPath(member.name)
    is_plain = member.isdir() or (member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse())
    if not is_plain:
        raise ValueError(f"{archive} is refused: {member.name!r} is neither a regular file nor a folder")
    if name.is_absolute() or ".." in name.parts or "\0" in member.name or (not name.parts and not member.isdir()):
        raise ValueError(f"{archive} is refused: {member.name!r} is no name within its folder")
    if member.size < 0:
        raise ValueError(f"{archive} is refused: {member.name!r} has a size of {member.size}")
    return folder.joinpath(*name.parts)


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, archive: Path) -> None:
    """Write a file or folder. Nothing below `folder` is a link, so that names can't lead out of it."""
    path = _target(archive, member, folder)
    try:
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with name_in_errors(archive), path.open("xb") as file:
            content = tar.extractfile(member)
            assert content is not None
            left = member.size
            while left:
                block = content.read(min(left, _BLOCK_BYTES))
                if not block:
                    raise ValueError(f"{archive} is no archive of runs: it ends within {member.name!r}")
                file.write(block)
                left -= len(block)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise ValueError(f"{archive} is refused: {member.name!r} is in it twice, or below a file") from None
