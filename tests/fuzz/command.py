"""Run one command line in this process, with limits of time and memory, and tell how it ended."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.own import forget

SOFT_SECONDS = 3.0
"""After this time on the processor the command gets Ctrl-C; a busy machine makes nothing look slow."""
WAITING_FACTOR = 10
"""A command that waits gets this many times as long on the clock."""
HARD_SECONDS = 6.0
"""Time after Ctrl-C at which a command counts as hanging."""
WATCHDOG_SECONDS = 120
"""Time on the processor after which the whole process is ended: a call into C that answers to no signal."""
EXTRA_BYTES = 2 * 2**30
"""Address space that a command may take beyond what the process has."""
MAX_FILE_BYTES = 256 * 2**20
MAX_PROCESSES = 8
"""Processes that one command may start here."""

STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGPROF)

LONG_WORK = (
    "tra.training.",
    "tra.evaluation.",
    "tra.generation",
    "tra.bench.",
    "tra.model",
    "tra.report.",
    "tra.suite.",
)
"""Modules that may work as long as they were asked to, as long as Ctrl-C ends them."""

RUNNING_FILE = Path(tempfile.gettempdir()) / f"tra-fuzz-{os.getpid()}.txt"
"""The command line under way, for the case that it ends this process."""


class HangError(BaseException):
    """The command didn't end on Ctrl-C."""


class RunawayError(BaseException):
    """The command started too many processes."""


@dataclass
class Outcome:
    """How a command ended."""

    arguments: tuple[str, ...]
    status: int | None = None
    stdout: str = ""
    stderr: str = ""
    failures: list[str] = field(default_factory=list)
    """Signatures of what a command must never do: exception and place."""
    trace: str = ""
    was_interrupted: bool = False


_executed: set[str] = set()
"""Files whose code was run, of those that lie where commands may find them."""


def _note_executed(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and _watched and isinstance(arguments[0], types.CodeType):
        name = arguments[0].co_filename
        if name.startswith(_watched):
            _executed.add(name)


_watched = ""
sys.addaudithook(_note_executed)


@contextlib.contextmanager
def _no_own_files(folder: Path, outcome: Outcome) -> Iterator[None]:
    """Begin without imported files of one's own, and note which files' code was run that nobody named."""
    global _watched
    _executed.clear()
    _watched = f"{folder.parents[1]}{os.sep}"
    path = list(sys.path)
    forget()
    try:
        yield
    finally:
        _watched = ""
        forget()
        sys.path[:] = path
        for name in [name for name in sys.modules if name.startswith(("tra_own_", "evil"))]:
            del sys.modules[name]
        words = set(_words(outcome.arguments))
        words |= {"own_mechanism.py", "own_task.py"} if "suite.py" in words else set()  # which names them itself
        named = {os.path.realpath(folder / word) for word in words}
        outcome.failures += [
            f"Imported {os.path.basename(file)}, which nobody named"  # noqa: PTH119 - names may be hostile
            for file in sorted(_executed)
            if os.path.realpath(file) not in named
        ]


def _words(arguments: Iterable[str]) -> Iterator[str]:
    """Yield what may be a path: arguments, values of `key=value`, and files of `FILE.py:NAME`."""
    for argument in arguments:
        for word in (argument, argument.partition("=")[2]):
            yield word
            yield word.rpartition(":")[0]


class _FakeStatus:
    """A process that has ended: a suite's cell, which was run in this process instead."""

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode

    def poll(self) -> int:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    def terminate(self) -> None:
        pass


def place(trace: types.TracebackType | None, default: str = "?") -> str:
    """Return module:function of the innermost frame of the package in a traceback."""
    found = default
    while trace is not None:
        found = _frame_place(trace.tb_frame) or found
        trace = trace.tb_next
    return found


def _frame_place(frame: types.FrameType) -> str | None:
    module = frame.f_globals.get("__name__", "")
    return f"{module}:{frame.f_code.co_name}" if module.split(".")[0] == "tra" else None


def signature(error: BaseException) -> str:
    return f"{type(error).__name__} {place(error.__traceback__)}"


def run(
    arguments: Sequence[str], folder: Path, seconds: float = SOFT_SECONDS, call: Callable[[], object] | None = None
) -> Outcome:
    """Run `tra` with these arguments in a folder; or `call` instead, with arguments that tell what it is."""
    from tra.cli.main import main

    outcome = Outcome(tuple(arguments))
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    stdin = io.TextIOWrapper(io.BytesIO(b"w1i0i1r\n"), "utf-8")
    RUNNING_FILE.write_text(f"{folder}: {shlex.join(arguments)}".encode(errors="backslashreplace").decode())
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.multiple(sys, argv=["tra", *arguments], stdin=stdin, stdout=out, stderr=err),
            mock.patch("subprocess.Popen", _popen(outcome)),
            mock.patch.dict(os.environ, {"TRA_COMMIT": "fuzz", "COLUMNS": "120"}),
            warnings.catch_warnings(),
            _no_own_files(folder, outcome),
            _limits(outcome, seconds),
        ):
            warnings.simplefilter("ignore")
            if call is None:
                main()
                outcome.failures.append("NoStatus main returned")
            else:
                call()
                outcome.status = 0
    except SystemExit as end:
        outcome.status = 0 if end.code is None else end.code if isinstance(end.code, int) else None
    except (HangError, RunawayError) as error:
        outcome.failures.append(f"{type(error).__name__} {error}")
        outcome.trace = traceback.format_exc()
    except BaseException as error:
        outcome.failures.append(signature(error))
        outcome.trace = traceback.format_exc()
    finally:
        os.chdir(before)
    outcome.stdout, outcome.stderr = (text.buffer.getvalue().decode(errors="replace") for text in _flushed(out, err))
    return outcome


def _flushed(*streams: io.TextIOWrapper) -> Iterator[Any]:
    for stream in streams:
        with contextlib.suppress(ValueError):
            stream.flush()
        yield stream


@contextlib.contextmanager
def _limits(outcome: Outcome, seconds: float) -> Iterator[None]:
    def interrupt(_number: int, frame: types.FrameType | None) -> None:
        places = []
        while frame is not None:
            places.append(_frame_place(frame))
            frame = frame.f_back
        ours = [at for at in places if at is not None]
        is_long_work = any(at.startswith(LONG_WORK) for at in ours)
        if outcome.was_interrupted:
            raise HangError(next(iter(ours), "?"))
        outcome.was_interrupted = True
        if not is_long_work:
            outcome.failures.append(f"Slow {next(iter(ours), '?')}")
        _set_timers(10 * HARD_SECONDS if is_long_work else HARD_SECONDS)
        signal.raise_signal(signal.SIGINT)

    kept = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    spaces = {
        resource.RLIMIT_AS: _address_space() + EXTRA_BYTES,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
    }
    limits = {kind: resource.getrlimit(kind) for kind in spaces}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, WATCHDOG_SECONDS)  # its signal ends the process
    for kind, (_, hard) in limits.items():
        resource.setrlimit(kind, (spaces[kind], hard))
    _set_timers(seconds)
    try:
        yield
    finally:
        _set_timers(0.0)
        for kind, limit in limits.items():
            resource.setrlimit(kind, limit)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        for number, handler in kept.items():
            signal.signal(number, handler)


def _set_timers(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WAITING_FACTOR * seconds)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _popen(outcome: Outcome) -> Callable[..., Any]:
    """Return a stand-in for `subprocess.Popen` that runs cells here and starts few other processes."""
    real, started = subprocess.Popen, 0

    def start(command: Sequence[str], *rest: Any, **settings: Any) -> Any:
        nonlocal started
        command = [word for word in command if word != "-P"]
        if command[1:3] == ["-m", "tra.suite.cell"]:
            return _FakeStatus(_run_cell(outcome, command[3:], settings["stdout"]))
        started += 1
        if command[1:3] == ["-m", "tra.bench.step"]:  # one for every case: long work, as it was asked for
            outcome.was_interrupted = True
            raise KeyboardInterrupt
        if started > MAX_PROCESSES:
            raise RunawayError(" ".join(command[:3])[:80])
        return real(command, *rest, **settings)

    return start


def _run_cell(outcome: Outcome, arguments: Sequence[str], log: Any) -> int:
    from tra.suite.cell import run_cell

    folder, device, seconds, *_ = arguments  # files of one's own are imported in this process already
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            status = run_cell(
                Path(folder), None if device == "-" else device, None if seconds == "-" else float(seconds)
            )
        if outcome.was_interrupted:  # Ctrl-C reaches the suite, too, not its cell alone
            raise KeyboardInterrupt
        return status
    except Exception as error:
        outcome.failures.append(f"cell: {signature(error)}")
        outcome.trace = traceback.format_exc()
        text.write(outcome.trace)
        return 1
    finally:
        log.write(text.getvalue().encode(errors="backslashreplace"))
        log.flush()
