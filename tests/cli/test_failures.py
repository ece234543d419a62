"""Failures of the machine, and of what is read: one line on stderr, no traceback."""

from __future__ import annotations

import errno
import io
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.runs.test_locks import held_by_another
from tests.slow import slow
from tra.cli.main import main, parse
from tra.runs import SHIPPED, read_attention
from tra.runs.failures import explain_failure, one_line
from tra.training import pick_device


def answer(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["tra", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return f"{ended.value.code} {lines[0]}"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), "x: No such file or directory"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), "x: the disk is full (No space left on device)"),
        (OSError("strange"), "strange"),
        (MemoryError(), "there is not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "there is not enough memory: Default"),
        (RuntimeError("CUDA out of memory. Tried"), "there is not enough memory: CUDA"),
        (RecursionError("maximum"), "nested too deeply"),
    ],
)
def test_failures_of_the_machine_are_explained(error: Exception, line: str) -> None:
    assert line in (explain_failure(error) or "")


def test_a_bug_is_not_explained() -> None:
    assert explain_failure(KeyError("x")) is None
    assert explain_failure(RuntimeError("size mismatch")) is None


def test_a_message_is_one_line() -> None:
    assert one_line("a\nb\x1b[2J\udcff ü") == "a\\nb\\x1b[2J\\udcff ü"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["evaluate", "new\nline"], "2 tra: new\\nline doesn't exist"),
        (["evaluate", "x" * 300], "1 tra: xxx"),
        (["generate", "flipflop-tra", "--number", str(2**64)], "2 tra: argument --number: a number has at most 64"),
        (["train", "--preset", "demo", "--time-limit", "9" * 400 + "h"], "2 tra: a duration of '999"),
        (["train", "--preset", "demo", "model.n_layers=1000000000"], "2 tra: model.n_layers must be at most"),
        (["train", "--preset", "demo", "model.d_model=1000000000"], "2 tra: the model would have about"),
        (["train", "--preset", "demo", "train.batch_size=1000000000000"], "2 tra: a batch would have"),
        (["train", "--preset", "copy", "task.arguments.alphabet=1000000000"], "2 tra: an alphabet needs at least 2"),
        (["train", "--preset", "demo", "optim.beta1=1"], "2 tra: optim.beta1 and optim.beta2 must lie in [0, 1)"),
        (["train", "--preset", "demo", "model.gate_bias=NaN"], "2 tra: model.gate_bias must be a number"),
        (["train", "--preset", "demo", "optim.lr=1e400"], "2 tra: optim.lr must be a number"),
        (["train", "--preset", "demo", "optim.clip=NaN"], "2 tra: optim.clip must be a number"),
        (["train", "--preset", "demo", f"train.seed={'9' * 400}"], "2 tra: train.seed must be a number"),
        (["train", "--preset", "copy", f"task.arguments.alphabet={2**64}"], "2 tra: task.arguments.alphabet must be"),
        (["train", "--preset", "demo", "--device", "meta"], "2 tra: tra does not run on the device 'meta'"),
        (["train", "--preset", "demo", "model.mechanism=differential", "model.n_heads=7"], "2 tra: "),
    ],
)
def test_a_bad_command_is_one_line(
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    answered = answer(arguments, monkeypatch, capsys)
    assert answered.startswith(line)
    assert list(tmp_path.rglob("config.json")) == []  # no folder of a run that can't be trained


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "--preset", "demo", "--out", "FILE"], "1 tra: FILE: Not a directory"),
        (["train", "--preset", "demo", "--out", "FILE/below"], "1 tra: FILE/below: Not a directory"),
        (["train", "--config", "FOLDER", "--out", "new"], "2 tra: FOLDER can't be read: Is a directory"),
        (["evaluate", "FILE"], "2 tra: FILE is not a run folder"),
        (["evaluate", "flipflop-tra", "--rows", "FOLDER"], "2 tra: there is no file FOLDER"),
        (["prepare", "FILE", "FILE/below", "--tokenizer", "bytes", "--format", "text"], "2 tra: "),
        (["suite", "merge", "FILE", "--out", "new"], "2 tra: FILE is no archive of runs"),
        *slow(
            (["export", "flipflop-tra", "FILE"], "2 tra: "),
            (["attend", "flipflop-tra", "--out", "FILE/new.png"], "1 tra: "),
            (["calibrate", "flipflop-tra", "--sequences", "2", "--out", "FILE/windows.json"], "1 tra: "),
        ),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_file_where_a_folder_is_meant_and_the_reverse(
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("mine")
    Path("FOLDER").mkdir()
    if arguments[0] == "export":
        pytest.importorskip("transformers")
    found = answer(arguments, monkeypatch, capsys)
    assert found.startswith(line)
    assert "FILE" in found or "FOLDER" in found
    assert Path("FILE").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FILE", "FOLDER"]


GRID = """
from tra.presets import preset
from tra.suite import Cell, Part

def mine():
    return {"one": Part([Cell("demo", preset("demo"))])}
"""

WRITING = (
    "evaluate run --splits iid --examples 4",
    "report run --out new.html",
    "suite run grid.py:mine --out cells",
    "suite merge cells --out merged",
    "train --preset demo --out new",
    *slow(
        "evaluate run --splits iid --examples 4 --diagnose",
        "attend run --out new.svg",
        "report run --out new",
        "export run new",
    ),
)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("evaluated")
    shutil.copytree(SHIPPED / "flipflop-tra", place / "run")
    parse(["evaluate", str(place / "run"), "--splits", "iid", "--examples", "4", "--device", "cpu"])()
    (place / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    shutil.copytree(place / "run", place / "cells" / "one")
    (place / "grid.py").write_text(GRID)
    return place


@pytest.mark.parametrize("line", WRITING)
def test_a_full_disk_is_one_line(
    line: str,
    evaluated: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """All that was there stays, and nothing half-written is left."""
    if line.startswith("export"):
        pytest.importorskip("transformers")
    place = tmp_path / "place"
    shutil.copytree(evaluated, place)
    monkeypatch.chdir(place)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    found = answer(line.split(), monkeypatch, capsys)
    assert re.match(r"1 tra: .*the disk is full \(No space left on device\)", found), found
    assert any(word in found for word in ("run", "new", "cells", "merged"))  # it says what could not be written
    assert {path: path.read_bytes() for path in before} == before
    assert not [path for path in place.rglob("*") if path.is_file() and path not in before and path.name != "lock"]


@pytest.mark.parametrize("how", ["--resume", "--overwrite"])
def test_a_second_writer_gets_one_line(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(SHIPPED / "flipflop-tra", run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    preset = [] if how == "--resume" else ["--preset", "demo"]
    with held_by_another(run):
        found = answer(["train", *preset, "--out", str(run), how], monkeypatch, capsys)
    assert found == f"2 tra: {run} is being written by another process"
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.name != "lock"} == before


@pytest.mark.parametrize("device", ["meta", "mps", "xpu", "vulkan", "cuda:99"])
def test_unusable_devices_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"device|CUDA"):
        pick_device(device)


def test_a_small_file_of_maps_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    """Only headers are read: shapes that would take 4 GiB, and nothing behind them."""
    file = tmp_path / "attend.npz"
    with zipfile.ZipFile(file, "w") as packed:
        for name in ("symbols", "row_symbols"):
            packed.writestr(f"{name}.npy", _array(np.array(["a"])))
        for name in ("rows", "columns", "marked", "layers", "heads"):
            packed.writestr(f"{name}.npy", _array(np.zeros(1, np.int64)))
        for name, dtype in (("weights", "|u1"), ("content", "<f2"), ("distances", "<u2")):
            packed.writestr(f"{name}.npy", _header(dtype, (1, 1, 2**15, 2**15)))
        packed.writestr("null.npy", _array(np.zeros((1, 1, 1), np.bool_)))
        for name in ("mechanism", "title"):
            packed.writestr(f"{name}.npy", _array(np.array("tra")))
    with pytest.raises(ValueError, match="bytes, more than"):
        read_attention(file)


def _array(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": dtype, "fortran_order": False, "shape": shape})
    return content.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc, to see that the import has begun")
def test_ctrl_c_while_torch_is_imported_is_one_line() -> None:
    command = [sys.executable, "-m", "tra", "evaluate", "flipflop-tra"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "libtorch" not in maps.read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "tra: interrupted\n")
