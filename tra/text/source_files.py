"""Read source files, plain or compressed, as blocks of bytes, text and lines. Errors name file and byte."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 2**16
"""Bytes read at a time."""

COMPRESSIONS = (".xz", ".gz")


class SourceFile:
    """One file, read once from start to end, with its size and checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._digest = hashlib.sha256()

    def facts(self) -> dict[str, Any]:
        """Return its entry in the manifest; complete after the last block was read."""
        return {"name": self.path.name, "bytes": self.size, "sha256": self._digest.hexdigest()}

    def blocks(self, report: Callable[[int], None]) -> Iterator[bytes]:
        """Yield its content, decompressed if the name says so."""
        self._digest = hashlib.sha256()
        self.size = 0
        with self.path.open("rb", buffering=0) as raw:
            counted = io.BufferedReader(_ReportingFile(raw, self._count(report)), BLOCK_BYTES)
            opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(self.path.suffix)
            stream: Any = opener(counted) if opener else counted
            try:
                while block := stream.read(BLOCK_BYTES):
                    yield block
                while counted.read(BLOCK_BYTES):  # bytes after the compressed stream are part of the checksum
                    pass
            except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{self.path} is damaged: {error}") from None

    def text(self, report: Callable[[int], None]) -> Iterator[str]:
        """Yield its text, with every line end as it is: the parts together are the file, to the byte."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        done = 0  # bytes decoded so far
        for block in self.blocks(report):
            undecoded = len(decoder.getstate()[0])
            try:
                yield decoder.decode(block)
            except UnicodeDecodeError as error:
                raise self._not_utf8(done - undecoded + error.start) from None
            done += len(block)
        if left := decoder.getstate()[0]:
            raise self._not_utf8(done - len(left))

    def _not_utf8(self, offset: int) -> ValueError:
        return ValueError(f"{self.path} is not UTF-8 text: byte {offset:,} can't be decoded")

    def _count(self, report: Callable[[int], None]) -> Callable[[memoryview], None]:
        def count(read: memoryview) -> None:
            self._digest.update(read)
            self.size += len(read)
            report(len(read))

        return count


class _ReportingFile(io.RawIOBase):
    """A file that passes all it reads to `report` too."""

    def __init__(self, raw: io.FileIO, report: Callable[[memoryview], None]) -> None:
        self.raw = raw
        self.report = report

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.raw.readinto(buffer) or 0
        self.report(memoryview(buffer)[:count])
        return count


def split_lines(blocks: Iterable[str]) -> Iterator[str]:
    """Yield lines with their ends. Only a newline ends a line: text may contain what else Python takes for an end."""
    line: list[str] = []
    for block in blocks:
        start = 0
        while (end := block.find("\n", start) + 1) > 0:
            line.append(block[start:end])
            yield "".join(line)
            line.clear()
            start = end
        if start < len(block):
            line.append(block[start:])
    if line:
        yield "".join(line)
