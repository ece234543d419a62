"""Results that travel: a suite's folders as one archive, and those of several machines in one place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tra.runs import RunFolder
from tra.suite.state import state

SMALL_BYTES = 8 * 2**20
"""Weights and checkpoints up to this size travel too."""

LEFT_BEHIND = ("lock", "log.txt")


def pack(out: Path, file: Path) -> int:
    """All run folders under `out` as a .tar.gz, written whole or not at all. Returns how many."""
    folders = run_folders(out)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            for folder in folders:
                for path in _small_files(folder):
                    archive.add(path, path.relative_to(out))
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return len(folders)


def run_folders(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("*/config.json"))


def _small_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in LEFT_BEHIND and not path.name.startswith("."):
            is_heavy = path.suffix == ".safetensors" and path.stat().st_size > SMALL_BYTES
            if not is_heavy:
                yield path


class Merged(NamedTuple):
    """What `merge` did."""

    taken: list[str]
    present: list[str]
    """There already, and the same."""
    conflicts: list[str]
    """There already, and another; what was there stays."""
    warnings: list[str]


def merge(sources: Sequence[Path], out: Path) -> Merged:
    """Bring run folders of several places (folders, or archives that `pack` made) together under `out`.

    Of a cell that several sources have, the one that came furthest is taken. One that is in `out` already is never
    touched: equal results are passed over, others are a conflict.
    """
    merged = Merged([], [], [], [])
    best: dict[str, Path] = {}
    commits: dict[str, set[str]] = {}
    for source in sources:
        for folder in run_folders(_opened(source, out)):
            known = best.get(folder.name)
            if known is not None and _progress(known) == _progress(folder) and not _same(known, folder):
                if state(folder).status == "done":
                    merged.conflicts.append(f"{folder.name}: {folder.parent} and {known.parent} have other results")
                continue
            if known is None or _progress(folder) > _progress(known):
                best[folder.name] = folder
    out.mkdir(parents=True, exist_ok=True)
    for name, folder in sorted(best.items()):
        for session in _sessions(folder):
            commits.setdefault(str(session.get("commit")), set()).add(name)
        if not (out / name).exists():
            _copy(folder, out / name)
            merged.taken.append(name)
        elif _same(folder, out / name):
            merged.present.append(name)
        else:
            merged.conflicts.append(f"{name}: {folder.parent} has other results than {out}, which stay")
    if len(commits) > 1:
        counts = ", ".join(f"{commit} ({len(names)})" for commit, names in sorted(commits.items()))
        merged.warnings.append(f"the runs come from different versions of the code: {counts}")
    shutil.rmtree(out / ".unpacked", ignore_errors=True)
    return merged


def _opened(source: Path, out: Path) -> Path:
    if source.is_dir():
        return source
    if not source.is_file():
        raise ValueError(f"there is no folder or archive {source}")
    place = out / ".unpacked" / hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        with tarfile.open(source) as archive:
            archive.extractall(place, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{source} is no archive of runs: {error}") from None
    return place


def _sessions(folder: Path) -> list[dict[str, str]]:
    file = RunFolder(folder).environment_file
    return json.loads(file.read_text())["sessions"] if file.is_file() else []


def _progress(folder: Path) -> tuple[bool, int]:
    found = state(folder)
    return found.status == "done", found.step


def _results(folder: Path) -> dict[str, bytes]:
    """What a run says, without when and where it was said."""
    run = RunFolder(folder)
    found = {}
    for file in (run.config_file, run.evaluation_file, run.diagnosis_file, run.perplexity_file):
        if file.is_file():
            rows = [json.loads(line) for line in file.read_text().splitlines()] if file.suffix == ".jsonl" else []
            for row in rows:
                for name in ("seconds", "device"):
                    row.pop(name, None)
            found[file.name] = json.dumps(rows).encode() if rows else file.read_bytes()
    return found


def _same(one: Path, other: Path) -> bool:
    return _results(one) == _results(other) and state(one).step == state(other).step


def _copy(folder: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(folder, temporary, ignore=shutil.ignore_patterns("lock"))
    temporary.rename(target)
