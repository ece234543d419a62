"""Run commands as children of one warmed process, and let a fault strike at their n-th change of a folder.

Importing torch takes seconds and a command on tiny inputs a tenth of one, so a child is forked, not started.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from tests.chaos.syscalls import NEEDS_SPACE, Call, Listener, install_filter, kill_process, write_half

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_SECONDS = 60.0
"""A command that takes longer hangs."""
PATIENCE_SECONDS = 4.0
"""Time a second process gets while the first is held; after it, both go on."""
UNWATCHED = ("/dev/", "/proc/", "pipe:", "socket:", "anon_inode:", "/memfd:")


SAVE_SHARDED = "(save-sharded)"
"""In the place of a verb: see `_save_sharded`."""


class Fault(NamedTuple):
    """What strikes, and before which change (counted from 1)."""

    kind: str  # "kill", "half" (kill inside a write), "kill-one" (only the process that writes), "full", "hold"
    at: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.at}"


class Outcome(NamedTuple):
    """How a command ended."""

    status: int  # negative: killed by this signal
    output: str
    errors: str
    changes: list[str]
    names: list[str]  # of the system calls
    sizes: list[int]  # bytes of each write
    pids: list[int]
    outside: list[str]  # changes outside the folder
    struck: bool
    is_hanging: bool

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.strip()]


def warm_up() -> None:
    """Import what commands import, and nothing that starts a thread."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # read when numpy and torch are imported
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    sys.dont_write_bytecode = True
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    import matplotlib

    matplotlib.use("Agg")
    import importlib

    for name in (
        "torch", "torch._dynamo", "torch.utils._pytree", "matplotlib.pyplot", "PIL.PngImagePlugin", "plotly.offline",
        "rich.console", "rich.progress", "rich.table", "rich.traceback", "transformers", "tarfile", "lzma", "runpy",
        "transformers.models.auto.modeling_auto", "transformers.modeling_utils", "tokenizers", "safetensors.torch",
        "tra.cli.main", "tra.training.trainer", "tra.evaluation.attention_maps", "tra.evaluation.diagnosis",
        "tra.evaluation.perplexity", "tra.hub.export", "tra.report.page", "tra.report.summary", "tra.report.language",
        "tra.report.comparison", "tra.report.heatmaps", "tra.suite.local", "tra.suite.archive", "tra.suite.cell",
        "tra.suite.ray_engine", "tra.cli.suite_view", "tra.text.prepare", "tra.evaluation.calibration",
        "tra.training.sharded_checkpoint",
    ):  # fmt: skip
        importlib.import_module(name)
    import torch
    from matplotlib.font_manager import findfont

    torch.set_num_threads(1)
    findfont("DejaVu Sans")
    gc.collect()
    gc.freeze()


class Process:
    """A command under way in a folder, stopped at each of its changes for as long as it takes to look at it."""

    def __init__(
        self,
        command: str,
        folder: Path,
        fault: Fault | None = None,
        look: Callable[[Call], None] = lambda _: None,
        clock_goes_back: bool = False,
    ) -> None:
        self.root, self.fault, self.look = f"{folder}/", fault, look
        self.said = {name: folder.parent / f"{folder.name}.{id(self)}.{name}" for name in ("out", "err")}
        self.changes: list[str] = []
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.pids: list[int] = []
        self.outside: list[str] = []
        self.held: Call | None = None
        self.full = self.struck = self.is_hanging = False
        self.status: int | None = None
        here, there = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            here.close()
            _be_the_command(shlex.split(command), folder, self.said, there, clock_goes_back)
        there.close()
        with here:
            descriptors = socket.recv_fds(here, 1, 1)[1]
        if not descriptors:
            raise RuntimeError(f"{command}: it ended before it began: {self.said['err'].read_text()}")
        self.listener = Listener(descriptors[0])

    def answer_calls(self, timeout: float) -> None:
        """Answer the calls that come within the time; note when the process has ended."""
        while self.status is None and self.held is None:
            call = self.listener.next_call(timeout)
            if call is not None:
                self._answer(call)
            elif self.listener.is_over():
                self._reap()
            else:
                return

    def let_go_on(self) -> None:
        """End the hold."""
        if self.held is not None:
            call, self.held = self.held, None
            self.listener.let_go_on(call)

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        os.killpg(self.pid, signal.SIGKILL)
        self._reap()

    def run(self) -> Outcome:
        """Let it run to its end."""
        deadline = time.monotonic() + MAX_SECONDS
        while self.status is None:
            self.answer_calls(1.0)
            if self.status is None and time.monotonic() > deadline:
                self.is_hanging = True
                self.kill()
        return self.outcome()

    def outcome(self) -> Outcome:
        output, errors = (file.read_text(errors="replace") for file in self.said.values())
        for file in self.said.values():
            file.unlink()
        assert self.status is not None
        return Outcome(
            self.status, output, errors, self.changes, self.names, self.sizes, self.pids, self.outside, self.struck,
            self.is_hanging,
        )  # fmt: skip

    def _answer(self, call: Call) -> None:
        if not any(path.startswith(self.root) for path in call.paths):
            if call.paths and call.is_change and not self._is_unwatched(call.paths[0]):
                self.outside.append(call.describe("/"))
            self.listener.let_go_on(call)
            return
        if not call.is_change:
            self.listener.let_go_on(call)
            return
        self.changes.append(call.describe(self.root))
        self.names.append(call.name)
        self.sizes.append(call.arguments[2] if call.name in ("write", "pwrite64") else 0)
        self.pids.append(call.pid)
        self.look(call)
        if self.fault is not None and len(self.changes) == self.fault.at:
            self.struck = True
            if self.fault.kind in ("kill", "half"):
                if self.fault.kind == "half":
                    write_half(call)
                self.kill()
                return
            if self.fault.kind == "kill-one":
                kill_process(call)
                return
            if self.fault.kind == "hold":
                self.held = call
                return
            self.full = True
        if self.full and call.name in NEEDS_SPACE and not call.fails_anyway:
            self.listener.fail(call, errno.ENOSPC)
        else:
            self.listener.let_go_on(call)

    def _is_unwatched(self, path: str) -> bool:
        return path.startswith(UNWATCHED) or Path(path.removesuffix(" (deleted)")) in self.said.values()

    def _reap(self) -> None:
        """Wait for the process and its children, which are ours once it has gone."""
        self.listener.close()
        while True:
            try:
                pid, status = os.waitpid(-self.pid, 0)
            except ChildProcessError:
                return
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)


def run(command: str, folder: Path, fault: Fault | None = None, **settings: Any) -> Outcome:
    """Run a command in a folder to its end."""
    return Process(command, folder, fault, **settings).run()


def run_both(command: str, rival: str, folder: Path, at: int) -> tuple[Outcome, Outcome]:
    """Hold a process before its n-th change, run a second one in the same folder, then let the first go on."""
    first = Process(command, folder, Fault("hold", at))
    deadline = time.monotonic() + MAX_SECONDS
    while first.held is None and first.status is None:
        first.answer_calls(1.0)
    second = Process(rival, folder)
    patience = time.monotonic() + PATIENCE_SECONDS
    while first.status is None or second.status is None:
        if second.status is not None or time.monotonic() > patience:
            first.let_go_on()
        for process in (first, second):
            process.answer_calls(0.02)
            if process.status is None and time.monotonic() > deadline:
                process.is_hanging = True
                process.kill()
    return first.outcome(), second.outcome()


def _be_the_command(
    arguments: list[str], folder: Path, said: dict[str, Path], to_supervisor: socket.socket, clock_goes_back: bool
) -> NoReturn:
    """Become `tra ARGUMENTS` in this child."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setpgid(0, 0)
        _redirect(said["out"].open("ab"), said["err"].open("ab"))
        os.chdir(folder)
        os.environ |= {"COLUMNS": "200", "TRA_COMMIT": "chaos", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        sys.argv = ["tra", *arguments]
        subprocess.Popen = _start_cell(subprocess.Popen)  # type: ignore[misc]
        if clock_goes_back:
            _turn_clock_back()
        install_filter(to_supervisor)
        to_supervisor.close()
        from tra.cli.main import main

        _finish(main if arguments[0] != SAVE_SHARDED else lambda: _save_sharded(*arguments[1:]))
    finally:
        os._exit(99)


def _save_sharded(run: str, step: str) -> None:
    """Save a run's newest checkpoint again, as several processes do for sharded weights, but under another step.

    Stands in for the whole command, which would need torchrun: this is the part of it that writes other files.
    """
    import warnings

    from tra.runs import RunFolder
    from tra.runs.failures import explain_failure
    from tra.training.checkpoint import checkpoints, read_checkpoint
    from tra.training.distributed import Ranks
    from tra.training.sharded_checkpoint import save_sharded_checkpoint

    warnings.simplefilter("ignore")
    folder = Path(run) / "checkpoints"
    try:
        with RunFolder(Path(run)).lock():  # which removes what killed processes left
            state = read_checkpoint(checkpoints(folder)[-1])
            save_sharded_checkpoint(folder, int(step), state.tensors, Ranks())
    except (ValueError, OSError) as error:
        print(f"tra: {explain_failure(error) or error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from None


def _redirect(output: IO[bytes], errors: IO[bytes]) -> None:
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)


def _finish(function: Callable[[], object]) -> NoReturn:
    """Call a function, and end as the interpreter would."""
    status: object = 0
    try:
        function()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = 120
    os._exit(int(status or 0))  # type: ignore[call-overload]


def _start_cell(popen: Any) -> Any:
    """Return a Popen that forks cells of a suite, and starts all else as ever."""

    def start(command: Any, *arguments: Any, **settings: Any) -> Any:
        if isinstance(command, list) and command[:4] == [sys.executable, "-P", "-m", "tra.suite.cell"]:
            return _Cell(command[3:], settings["stdout"], settings["stderr"], settings.get("env"))
        return popen(command, *arguments, **settings)

    return start


class _Cell:
    """What `subprocess.Popen` offers, of a forked process."""

    def __init__(self, command: list[str], output: IO[bytes], errors: IO[bytes], environment: Any) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _redirect(output, errors)
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            sys.argv = command
            sys.modules.pop("tra.suite.cell", None)
            _finish(lambda: runpy.run_module("tra.suite.cell", run_name="__main__"))

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _turn_clock_back() -> None:
    """Let the wall clock go back by a day each time it is looked at."""
    gmtime, localtime = time.gmtime, time.localtime
    now = time.time()

    def back() -> float:
        nonlocal now
        now -= 86_400.0
        return now

    time.time = back
    time.time_ns = lambda: int(back() * 1e9)
    time.gmtime = lambda seconds=None: gmtime(back() if seconds is None else seconds)
    time.localtime = lambda seconds=None: localtime(back() if seconds is None else seconds)
