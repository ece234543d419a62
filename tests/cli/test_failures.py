"""Failures of the machine, and of what is read: one line on stderr, no traceback."""

from __future__ import annotations

import errno
import io
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tra.cli.main import main
from tra.runs import read_attention
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
