"""Source files, plain or compressed, as blocks of bytes, text and lines; what can't be read is one clear line."""

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

BLOCK = 2**16
COMPRESSIONS = (".xz", ".gz")


class SourceFile:
    """One file, read once from start to end. What is read is counted, and becomes part of its checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._digest = hashlib.sha256()

    def facts(self) -> dict[str, Any]:
        """For the manifest; whole after the last block was read."""
        return {"name": self.path.name, "bytes": self.size, "sha256": self._digest.hexdigest()}

    def blocks(self, report: Callable[[int], None]) -> Iterator[bytes]:
        """Decompressed, if the name says so."""
        self._digest = hashlib.sha256()
        self.size = 0
        with self.path.open("rb", buffering=0) as raw:
            counted = io.BufferedReader(_Counted(raw, self._count(report)), BLOCK)
            opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(self.path.suffix)
            stream: Any = opener(counted) if opener else counted
            try:
                while block := stream.read(BLOCK):
                    yield block
                while counted.read(BLOCK):  # to the end, whatever the compressor left
                    pass
            except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{self.path} is damaged: {error}") from None

    def text(self, report: Callable[[int], None]) -> Iterator[str]:
        """Nothing is translated: the parts together are the file, to the byte."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        done = 0  # bytes decoded so far
        for block in self.blocks(report):
            waiting = len(decoder.getstate()[0])
            try:
                yield decoder.decode(block)
            except UnicodeDecodeError as error:
                raise self._not_utf8(done - waiting + error.start) from None
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


class _Counted(io.RawIOBase):
    """A file that shows all it reads to `seen`."""

    def __init__(self, raw: io.FileIO, seen: Callable[[memoryview], None]) -> None:
        self.raw = raw
        self.seen = seen

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.raw.readinto(buffer) or 0
        self.seen(memoryview(buffer)[:count])
        return count


def lines_of(blocks: Iterable[str]) -> Iterator[str]:
    """Lines with their ends. Only a newline ends one: JSON and prose may hold what else Python takes for an end."""
    held: list[str] = []
    for block in blocks:
        start = 0
        while (end := block.find("\n", start) + 1) > 0:
            held.append(block[start:end])
            yield "".join(held)
            held.clear()
            start = end
        if start < len(block):
            held.append(block[start:])
    if held:
        yield "".join(held)
