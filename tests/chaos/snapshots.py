"""What a folder holds, without what differs between two undisturbed runs: times, and how often a run went on."""

from __future__ import annotations

import hashlib
import json
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Snapshot = dict[str, str]
"""Relative path -> digest of the contents; a folder's path ends with a slash."""

TIMES = ("seconds", "tokens_per_second", "started", "tokens_per_second_mean")


def snapshot(folder: Path) -> Snapshot:
    """Return what lies in a folder, hidden files too."""
    found: Snapshot = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_dir():
            found[f"{name}/"] = "folder"
        else:
            found[name] = _digest(path.name, path.read_bytes())
    return found


def part(whole: Snapshot, name: str) -> Snapshot:
    """Return a file, or a folder with all in it."""
    return {path: content for path, content in whole.items() if path == name or path.startswith(f"{name}/")}


def differences(one: Snapshot, other: Snapshot) -> list[str]:
    """Return in words what `other` has more, less or otherwise."""
    words = [f"{path} is missing" for path in sorted(one.keys() - other.keys())]
    words += [f"{path} is left" for path in sorted(other.keys() - one.keys())]
    return words + [f"{path} differs" for path in sorted(one.keys() & other.keys()) if one[path] != other[path]]


def _digest(name: str, content: bytes) -> str:
    normalise = next((function for end, function in NORMAL_FORMS.items() if name.endswith(end)), None)
    if normalise is None:
        return hashlib.sha256(content).hexdigest()[:16]
    try:
        return hashlib.sha256(normalise(content)).hexdigest()[:16]
    except (ValueError, KeyError, TypeError, tarfile.TarError, EOFError, OSError, zlib.error):
        return f"damaged {hashlib.sha256(content).hexdigest()[:16]}"


def _rows(content: bytes) -> bytes:
    rows = [json.loads(line) for line in content.decode().splitlines()]
    if content and not content.endswith(b"\n"):
        raise ValueError("the last line is cut")
    return json.dumps([_without_times(row) for row in rows]).encode()


def _without_times(row: Any) -> Any:
    return {key: value for key, value in row.items() if key not in TIMES} if isinstance(row, dict) else row


def _environment(content: bytes) -> bytes:
    sessions = json.loads(content)["sessions"]
    return b"environment" if isinstance(sessions, list) and sessions else b"none"


def _archive(content: bytes) -> bytes:
    import io

    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = {}
        for member in archive:
            file = archive.extractfile(member)
            members[member.name] = _digest(Path(member.name).name, file.read()) if file is not None else ""
    return json.dumps(members).encode()


NORMAL_FORMS: dict[str, Callable[[bytes], bytes]] = {
    "metrics.jsonl": _rows,
    ".jsonl": lambda content: json.dumps(sorted(json.loads(_rows(content)), key=json.dumps)).encode(),  # in any order
    "environment.json": _environment,
    "windows.json": lambda content: json.dumps(_without_times(json.loads(content))).encode(),
    "log.txt": lambda _: b"log",
    ".tar.gz": _archive,
}
