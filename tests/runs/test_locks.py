"""One process at a time writes to a run folder, and files that killed ones left are removed."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tra.runs import LockedError, folder_lock, put_row, read_rows, remove_stale_files, write_atomically

HOLD = """
import pathlib, sys, tra.runs
with tra.runs.folder_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


@contextlib.contextmanager
def held_by_another(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as process:
        with pytest.raises(LockedError, match="is being written by another process"), folder_lock(tmp_path):
            pass
        process.kill()
        process.wait()
        with folder_lock(tmp_path), folder_lock(tmp_path):  # as a cell that trains
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_row_waits_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tra.runs.rows.LOCK_SECONDS", 0.2)
    with held_by_another(tmp_path), pytest.raises(LockedError):
        put_row(tmp_path / "eval.jsonl", {"split": "iid"}, ("split",))
    put_row(tmp_path / "eval.jsonl", {"split": "iid"}, ("split",))
    assert read_rows(tmp_path / "eval.jsonl") == [{"split": "iid"}]


def test_a_link_named_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), folder_lock(tmp_path / "run"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_files_of_killed_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".link.1.tmp").symlink_to(tmp_path / "precious")
    for name in (".eval.jsonl.123.tmp", ".eval.jsonl.abc.tmp", "eval.jsonl.1.tmp", ".busy.7.tmp"):
        (tmp_path / name).write_text("")
    (tmp_path / ".folder.1.tmp").mkdir()
    with (tmp_path / ".busy.7.tmp").open() as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        remove_stale_files(tmp_path)
    left = {".busy.7.tmp", ".eval.jsonl.abc.tmp", ".folder.1.tmp", ".link.1.tmp", "eval.jsonl.1.tmp", "precious"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_writing_a_file_removes_what_killed_writers_of_it_left(tmp_path: Path) -> None:
    for name in (".a.json.99.tmp", ".b.json.99.tmp"):
        (tmp_path / name).write_text("half")
    write_atomically(tmp_path / "a.json", "{}")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", ".b.json.99.tmp"}


def test_a_full_disk_names_the_file_and_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    script = (
        "import pathlib, resource, signal, sys, tra.runs\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "try:\n    tra.runs.write_atomically(pathlib.Path(sys.argv[1]), 'x' * 100)\n"
        "except OSError as error:\n    print(error.filename, error.strerror)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.json")], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{tmp_path / 'a.json'} File too large\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]
