"""Pack a suite's run folders into one archive, and merge those of several machines."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tra.runs import RunFolder, read_sessions
from tra.suite.state import state

MAX_WEIGHT_BYTES = 8 * 2**20
"""Size up to which files of weights and checkpoints are packed too."""

NOT_PACKED = ("lock", "log.txt")


def pack(out: Path, file: Path) -> int:
    """Write all run folders under `out` to a .tar.gz, whole or not at all, and return how many."""
    folders = run_folders(out)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            for folder in folders:
                for path in _files_to_pack(folder):
                    archive.add(path, path.relative_to(out))
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return len(folders)


def run_folders(out: Path) -> list[Path]:
    """Return the run folders directly under a folder."""
    return sorted(path.parent for path in out.glob("*/config.json"))


def _files_to_pack(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in NOT_PACKED and not path.name.startswith("."):
            is_large = path.suffix == ".safetensors" and path.stat().st_size > MAX_WEIGHT_BYTES
            if not is_large:
                yield path


class MergeResult(NamedTuple):
    """What `merge` did with each run, by name."""

    taken: list[str]
    present: list[str]
    """Runs that `out` had already, with the same results."""
    conflicts: list[str]
    """Runs that `out` had already, with other results, which are kept."""
    warnings: list[str]


def merge(sources: Sequence[Path], out: Path) -> MergeResult:
    """Copy the run folders of several sources (folders, or archives of `pack`) to `out`.

    Of a cell that several sources have, the one with most progress is taken. A run that is in `out` already is never
    changed: equal results are skipped, others are a conflict.
    """
    merged = MergeResult([], [], [], [])
    furthest: dict[str, Path] = {}
    commits: dict[str, set[str]] = {}
    for source in sources:
        for folder in run_folders(_folder_of(source, out)):
            known = furthest.get(folder.name)
            if known is not None and _progress(known) == _progress(folder) and not _have_same_results(known, folder):
                if state(folder).status == "done":
                    merged.conflicts.append(f"{folder.name}: {folder.parent} and {known.parent} have other results")
                continue
            if known is None or _progress(folder) > _progress(known):
                furthest[folder.name] = folder
    out.mkdir(parents=True, exist_ok=True)
    for name, folder in sorted(furthest.items()):
        for session in _sessions(folder):
            commits.setdefault(str(session.get("commit")), set()).add(name)
        if not (out / name).exists():
            _copy(folder, out / name)
            merged.taken.append(name)
        elif _have_same_results(folder, out / name):
            merged.present.append(name)
        else:
            merged.conflicts.append(f"{name}: {folder.parent} has other results than {out}, which stay")
    if len(commits) > 1:
        counts = ", ".join(f"{commit} ({len(names)})" for commit, names in sorted(commits.items()))
        merged.warnings.append(f"the runs come from different versions of the code: {counts}")
    shutil.rmtree(out / ".unpacked", ignore_errors=True)
    return merged


def _folder_of(source: Path, out: Path) -> Path:
    """Return a source's folder of runs; an archive is unpacked below `out`."""
    if source.is_dir():
        return source
    if not source.is_file():
        raise ValueError(f"there is no folder or archive {source}")
    folder = out / ".unpacked" / hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{source} is no archive of runs: {error}") from None
    return folder


def _sessions(folder: Path) -> list[dict[str, str]]:
    file = RunFolder(folder).environment_file
    return read_sessions(file)


def _progress(folder: Path) -> tuple[bool, int]:
    found = state(folder)
    return found.status == "done", found.step


def _results(folder: Path) -> dict[str, bytes]:
    """Return a run's config and results, without the time and device of measurement."""
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


def _have_same_results(one: Path, other: Path) -> bool:
    return _results(one) == _results(other) and state(one).step == state(other).step


def _copy(folder: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(folder, temporary, ignore=shutil.ignore_patterns("lock"))
    temporary.rename(target)
