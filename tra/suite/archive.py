"""Pack a suite's run folders into one archive, and merge those of several machines."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tra.runs import (
    LOCK,
    TEMPORARY,
    RunFolder,
    atomic_file,
    flush_folder,
    name_in_errors,
    new_locked_folder,
    read_rows,
    remove_unlocked_folder,
)
from tra.suite.state import state
from tra.suite.unpacking import is_archive_of_runs, unpack

MAX_WEIGHT_BYTES = 8 * 2**20
"""Size up to which files of weights and checkpoints are packed too."""

LOG = "log.txt"
"""Name of a file that is merged, but not packed."""

MERGING = ".merging-"
"""How the names of the folders begin in which archives are unpacked."""


def pack(out: Path, file: Path) -> int:
    """Write all run folders under `out` to a .tar.gz, whole or not at all, and return how many."""
    check_pack_target(file)
    folders = run_folders(out)
    with atomic_file(file) as packed, tarfile.open(fileobj=packed, mode="w:gz", dereference=True) as archive:
        for folder in folders:
            for path in _files_to_pack(folder):
                archive.add(path, path.relative_to(out))
    return len(folders)


def check_pack_target(file: Path) -> None:
    """Raise a ValueError for an archive in a run folder, or over anything but an older archive of runs."""
    full = file.resolve()
    for folder in full.parents:
        if (folder / "config.json").is_file():
            raise ValueError(f"{file} lies in the run folder {folder}: name an archive elsewhere")
    if full.is_dir():
        raise ValueError(f"{file} is a folder: name a file for the archive")
    if full.exists() and full.stat().st_size > 0 and not is_archive_of_runs(full):
        raise ValueError(f"{file} exists and is no archive of runs, so it is not overwritten")


def run_folders(out: Path) -> list[Path]:
    """Return the run folders directly under a folder. Links to a config.json don't make one.

    Hidden folders are none: `.cache` holds compiled code that a suite's cells run.
    """
    files = (path for path in out.glob("*/config.json") if path.is_file() and not path.is_symlink())
    return sorted(path.parent for path in files if not path.parent.name.startswith("."))


def _regular_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a run folder, without links, locks and files that are being written."""
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink() and path.is_file() and path.name != LOCK and not TEMPORARY.fullmatch(path.name):
            yield path


def _files_to_pack(folder: Path) -> Iterator[Path]:
    for path in _regular_files(folder):
        if path.name != LOG and not path.name.startswith("."):
            is_large = path.suffix == ".safetensors" and path.stat().st_size > MAX_WEIGHT_BYTES
            if not is_large:
                yield path


class MergeResult(NamedTuple):
    """The names of runs by what `merge` did with them."""

    taken: list[str]
    present: list[str]
    """Runs that `out` had already, with the same results."""
    conflicts: list[str]
    """Runs that `out` had already, with other results, which are kept."""
    warnings: list[str]


def merge(sources: Sequence[Path], out: Path) -> MergeResult:
    """Copy the run folders of several sources (folders, or archives of `pack`) to `out`.

    If several sources have a cell, the one with most progress is taken. A run that is already in `out` is never
    changed: equal results are skipped, other results are a conflict.
    """
    with _private_folder(out) as temporary:
        parts = [_runs_of(source, temporary / str(number)) for number, source in enumerate(sources)]
        return _take([folder for part in parts for folder in part], out, temporary)


def _take(found: Sequence[Path], out: Path, temporary: Path) -> MergeResult:
    """Copy to `out` what it doesn't have of these run folders."""
    merged = MergeResult([], [], [], [])
    furthest: dict[str, Path] = {}
    commits: dict[str, set[str]] = {}
    for folder in found:
        known = furthest.get(folder.name)
        if known is not None and _progress(known) == _progress(folder) and not _have_same_results(known, folder):
            if state(folder).status == "done":
                merged.conflicts.append(f"{folder.name}: {folder.parent} and {known.parent} have other results")
            continue
        if known is None or _progress(folder) > _progress(known):
            furthest[folder.name] = folder
    for name, folder in sorted(furthest.items()):
        for session in RunFolder(folder).sessions():
            commits.setdefault(str(session.get("commit")), set()).add(name)
        if not (out / name).exists() and _copy(folder, out / name, temporary / "copy"):
            merged.taken.append(name)
        elif _have_same_results(folder, out / name):
            merged.present.append(name)
        else:
            merged.conflicts.append(f"{name}: {folder.parent} has other results than {out}, which stay")
    if len(commits) > 1:
        counts = ", ".join(f"{commit} ({len(names)})" for commit, names in sorted(commits.items()))
        merged.warnings.append(f"the runs come from different versions of the code: {counts}")
    return merged


def _runs_of(source: Path, temporary: Path) -> list[Path]:
    """Return a source's run folders; an archive is unpacked to `temporary`."""
    if source.is_dir():
        return run_folders(source)
    if not source.is_file():
        raise ValueError(f"there is no folder or archive {source}")
    temporary.mkdir()
    unpack(source, temporary)
    return run_folders(temporary)


@contextlib.contextmanager
def _private_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder in `out` for this merge alone; it is removed at the end, and so is `out` if nothing came in.

    Other merges' folders stay while they are locked; those of killed ones are removed.
    """
    missing = [path for path in (out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob(f"{MERGING}*"):
        remove_unlocked_folder(path)
    try:
        with new_locked_folder(out, MERGING) as temporary:
            yield temporary
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


def _progress(folder: Path) -> tuple[bool, int]:
    found = state(folder)
    return found.status == "done", found.step


def _results(folder: Path) -> dict[str, bytes]:
    """Return a run's config and results, without the time and device of measurement."""
    run = RunFolder(folder)
    found = {}
    for file in (run.config_file, run.evaluation_file, run.diagnosis_file, run.perplexity_file):
        if file.is_file():
            rows = read_rows(file) if file.suffix == ".jsonl" else []
            for row in rows:
                for name in ("seconds", "device"):
                    row.pop(name, None)
            found[file.name] = json.dumps(rows).encode() if rows else file.read_bytes()
    return found


def _have_same_results(one: Path, other: Path) -> bool:
    return _results(one) == _results(other) and state(one).step == state(other).step


def _copy(folder: Path, target: Path, temporary: Path) -> bool:
    """Copy the regular files of a run folder, and return whether no other process made `target` meanwhile."""
    temporary.mkdir()
    for path in _regular_files(folder):
        copied = temporary / path.relative_to(folder)
        copied.parent.mkdir(parents=True, exist_ok=True)
        with name_in_errors(target), path.open("rb") as source, copied.open("xb") as file:
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        shutil.rmtree(temporary)
        return False
    flush_folder(target.parent)
    return True
