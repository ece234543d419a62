"""Archives of runs that no `tra suite run --pack` made: links, devices, names that lead elsewhere, bombs."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import NamedTuple

from hypothesis import strategies as st

NAMES = (
    "cell/config.json", "cell/config.json", "cell/eval.jsonl", "cell/metrics.jsonl", "cell/model.safetensors", "cell",
    "cell/x", "../evil.txt", "../../evil.txt", "cell/../../../evil.txt", "BESIDE/sentinel.txt", "cell/link/evil.txt",
    "cell/link", "./cell/config.json", "run-1/config.json", "..", ".", "", "x" * 300, "d/" * 150 + "f", "cell/\n",
    "cell/ü", ".hidden/config.json", "a/b/config.json", "../cells/config.json", "lock", "cell/lock", "~/config.json",
)  # fmt: skip
KINDS = {
    "file": tarfile.REGTYPE,
    "folder": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "hardlink": tarfile.LNKTYPE,
    "pipe": tarfile.FIFOTYPE,
    "device": tarfile.CHRTYPE,
    "block": tarfile.BLKTYPE,
    "sparse": tarfile.GNUTYPE_SPARSE,
    "unknown": b"Z",
}
LINKS = ("..", "../..", "../../..", "BESIDE", "BESIDE/sentinel.txt", "cell", "cell/config.json", ".", "/etc/hostname",
         "d/" * 130 + "../" * 132 + "beside", "nowhere", "")  # fmt: skip
ENDS = ("whole", "whole", "whole", "whole", "truncated", "flipped", "garbage", "empty", "plain", "xz", "twice", "zip")
BOMB_BYTES = 64 * 2**20


class Member(NamedTuple):
    """One entry of an archive."""

    name: str
    kind: str
    link: str
    content: int
    """Which content a file has: the run's own of that name, another, or a bomb."""


class Archive(NamedTuple):
    """A whole archive; `place / name` is where it is written."""

    name: str
    members: tuple[Member, ...]
    end: str

    def write(self, place: Path) -> None:
        beside = str(place.parent / "beside")
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for member in self.members:
                info = tarfile.TarInfo(member.name.replace("BESIDE", beside))
                info.type, info.linkname, info.mode = KINDS[member.kind], member.link.replace("BESIDE", beside), 0o4777
                data = _content(member, place) if member.kind in ("file", "sparse") else b""
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        (place / self.name).write_bytes(_ended(content.getvalue(), self.end))


def archives() -> st.SearchStrategy[Archive]:
    kinds = st.sampled_from(("file",) * 6 + tuple(KINDS))
    member = st.builds(Member, st.sampled_from(NAMES), kinds, st.sampled_from(LINKS), st.integers(0, 30))
    whole = tuple(Member(f"cell/{name}", "file", "", 0) for name in ("config.json", "eval.jsonl", "metrics.jsonl"))
    members = st.lists(member, max_size=5).map(tuple)
    with_run = st.tuples(members, st.booleans()).map(lambda pair: (whole + pair[0]) if pair[1] else pair[0])
    return st.builds(Archive, st.just("hostile.tar.gz"), with_run, st.sampled_from(ENDS))


def _content(member: Member, place: Path) -> bytes:
    own = place / "run" / Path(member.name).name
    if member.content == 30:
        return bytes(BOMB_BYTES)
    if member.content < 20 and 0 < len(own.name) < 99 and own.is_file():
        return own.read_bytes()
    return (b"", b"x", b"{}", b"[]", b"null\n", b"\xff", b'{"sessions": 3}', b"[" * 9000)[member.content % 8]


def _ended(content: bytes, end: str) -> bytes:
    if end == "plain":
        return content
    if end == "xz":
        import lzma

        return lzma.compress(content, preset=0)
    if end == "zip":
        return b"PK\x03\x04" + content[:500]
    packed = gzip.compress(content, 1)
    if end == "truncated":
        return packed[: len(packed) * 2 // 3]
    if end == "flipped":
        middle = len(packed) // 2
        return packed[:middle] + bytes([packed[middle] ^ 16]) + packed[middle + 1 :]
    return {"garbage": packed[10:], "empty": b"", "twice": packed * 2}.get(end, packed)
