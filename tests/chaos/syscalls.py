"""Stop a process before each of its system calls that write, and let the caller decide what becomes of the call.

The kernel does the stopping (seccomp user notification, Linux 5.5 or later, no privileges needed), so every library
is covered, whatever language it is written in, and so are all children of the process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PR_SET_NO_NEW_PRIVS = 38
SECCOMP_SET_MODE_FILTER, NEW_LISTENER = 1, 8
RET_ALLOW, RET_USER_NOTIF = 0x7FFF0000, 0x7FC00000
NOTIF_RECV, NOTIF_SEND = 0xC0502100, 0xC0182101
CONTINUE = 1  # flag of an answer: run the call as it is
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
AT_FDCWD = -100

NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "seccomp": 317, "write": 1, "open": 2, "pwrite64": 18, "writev": 20, "sendfile": 40, "fsync": 74,
        "fdatasync": 75, "truncate": 76, "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85,
        "link": 86, "unlink": 87, "symlink": 88, "openat": 257, "mkdirat": 258, "unlinkat": 263, "renameat": 264,
        "linkat": 265, "symlinkat": 266, "fallocate": 285, "pwritev": 296, "renameat2": 316, "copy_file_range": 326,
        "pwritev2": 328,
    },
    "aarch64": {
        "seccomp": 277, "write": 64, "pwrite64": 68, "writev": 66, "sendfile": 71, "fsync": 82, "fdatasync": 83,
        "truncate": 45, "ftruncate": 46, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38,
        "fallocate": 47, "openat": 56, "pwritev": 70, "renameat2": 276, "copy_file_range": 285, "pwritev2": 287,
    },
}  # fmt: skip

DESCRIPTOR_CALLS = {  # name -> which argument is the file that is written
    "write": 0, "pwrite64": 0, "writev": 0, "pwritev": 0, "pwritev2": 0, "sendfile": 0, "copy_file_range": 2,
    "fsync": 0, "fdatasync": 0, "ftruncate": 0, "fallocate": 0,
}  # fmt: skip
PATH_CALLS = {  # name -> arguments with the folder's descriptor (None: there is none) and the path
    "open": (None, 0), "creat": (None, 0), "truncate": (None, 0), "rename": (None, 0), "mkdir": (None, 0),
    "rmdir": (None, 0), "unlink": (None, 0), "link": (None, 1), "symlink": (None, 1), "openat": (0, 1),
    "mkdirat": (0, 1), "unlinkat": (0, 1), "renameat": (0, 1), "renameat2": (0, 1), "linkat": (2, 3),
    "symlinkat": (1, 2),
}  # fmt: skip
SECOND_PATHS = {"rename": (None, 1), "renameat": (2, 3), "renameat2": (2, 3)}
WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range")
NEEDS_SPACE = (
    *WRITES, "open", "openat", "creat", "mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat", "fallocate",
    "fsync", "fdatasync",
)  # fmt: skip
"""Calls that fail on a full disk. Renaming, deleting and shortening go on working."""


def is_supported() -> bool:
    """Return whether this machine can stop a process at its writes."""
    if platform.system() != "Linux" or platform.machine() not in NUMBERS:
        return False
    here, there = socket.socketpair()
    with here, there:
        if (pid := os.fork()) == 0:
            try:
                install_filter(there)
                os._exit(0)
            except BaseException:
                os._exit(1)
        there.close()
        received = socket.recv_fds(here, 1, 1)[1]
        for descriptor in received:
            os.close(descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def install_filter(to_supervisor: socket.socket) -> None:
    """Stop this process, and all it starts, at each call that writes from now on; send away what answers them."""
    numbers = dict(NUMBERS[platform.machine()])
    seccomp = numbers.pop("seccomp")
    # A call with flags is compared with care: opening to read is frequent, and passes without a stop.
    program = [(0x20, 0, 0, 0)]  # load the call's number
    for name, argument in (("openat", 2), ("open", 1)):
        if name in numbers:
            number = numbers.pop(name)
            program += [
                (0x15, 0, 4, number),  # if it is this one, else skip four
                (0x20, 0, 0, 16 + 8 * argument),  # load the lower half of its flags
                (0x45, 0, 1, WRITING_FLAGS),
                (0x06, 0, 0, RET_USER_NOTIF),
                (0x06, 0, 0, RET_ALLOW),
            ]
    for number in numbers.values():
        program += [(0x15, 0, 1, number), (0x06, 0, 0, RET_USER_NOTIF)]
    program.append((0x06, 0, 0, RET_ALLOW))
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    filter_struct = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    listener = libc.syscall(seccomp, SECCOMP_SET_MODE_FILTER, NEW_LISTENER, ctypes.byref(filter_struct))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    socket.send_fds(to_supervisor, [b"x"], [listener])
    os.close(listener)


class Call(NamedTuple):
    """A call that a process waits for."""

    id: int
    pid: int  # of the thread
    name: str
    paths: tuple[str, ...]
    arguments: tuple[int, ...]

    @property
    def is_change(self) -> bool:
        """Whether it changes anything: not a mere opening of a file that is there, nor a write of nothing."""
        if self.name in ("open", "openat", "creat"):
            flags = self.arguments[2 if self.name == "openat" else 1]
            exists = os.path.lexists(self.paths[0])
            return self.name == "creat" or (not exists and bool(flags & os.O_CREAT)) or bool(flags & os.O_TRUNC)
        return True

    @property
    def fails_anyway(self) -> bool:
        """Whether it would fail anyway, as `mkdir` of a folder that is there does."""
        return self.name in ("mkdir", "mkdirat") and os.path.lexists(self.paths[0])

    def describe(self, root: str) -> str:
        """Return the call in words, with paths relative to the root."""
        shown = " -> ".join(os.path.relpath(path, root) for path in self.paths)
        size = f" {self.arguments[2]} bytes" if self.name in ("write", "pwrite64") else ""
        return f"{self.name} {shown}{size}"


class Listener:
    """The supervisor's end: calls come in, and each is answered."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.names = {number: name for name, number in NUMBERS[platform.machine()].items()}

    def next_call(self, timeout: float) -> Call | None:
        """Wait for a call. None: the time is over, or no process is left."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        ready = poll.poll(timeout * 1000)
        if not ready or not ready[0][1] & select.POLLIN:
            return None
        buffer = bytearray(80)
        try:
            fcntl.ioctl(self.descriptor, NOTIF_RECV, buffer)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):  # the process was killed in between
                return None
            raise
        call, pid, _flags, number, _arch, _pointer, *arguments = struct.unpack("QIIiIQ6Q", buffer)
        name = self.names[number]
        try:
            paths = tuple(_paths(pid, name, arguments))
        except (OSError, ValueError):
            paths = ()
        return Call(call, pid, name, paths, tuple(arguments))

    def is_over(self) -> bool:
        """Return whether no process is left under the filter."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        ready = poll.poll(0)
        return bool(ready) and bool(ready[0][1] & select.POLLHUP) and not ready[0][1] & select.POLLIN

    def let_go_on(self, call: Call) -> None:
        """Let the call happen."""
        self._answer(struct.pack("QqiI", call.id, 0, 0, CONTINUE))

    def fail(self, call: Call, number: int) -> None:
        """Let the call fail with an errno, and nothing happen."""
        self._answer(struct.pack("QqiI", call.id, 0, -number, 0))

    def _answer(self, answer: bytes) -> None:
        try:
            fcntl.ioctl(self.descriptor, NOTIF_SEND, bytearray(answer))
        except OSError as error:
            if error.errno != errno.ENOENT:  # the process was killed meanwhile
                raise

    def close(self) -> None:
        os.close(self.descriptor)


def write_half(call: Call) -> None:
    """Write the first half of what the call would write, in its place."""
    descriptor, address, count = call.arguments[:3]
    with Path(f"/proc/{call.pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        data = memory.read(count // 2)
    facts = dict(line.split(":\t") for line in Path(f"/proc/{call.pid}/fdinfo/{descriptor}").read_text().splitlines())
    appends = int(facts["flags"], 8) & os.O_APPEND
    file = os.open(f"/proc/{call.pid}/fd/{descriptor}", os.O_WRONLY)
    try:
        offset = call.arguments[3] if call.name == "pwrite64" else int(facts["pos"])
        os.pwrite(file, data, os.fstat(file).st_size if appends else offset)
    finally:
        os.close(file)


def kill_process(call: Call) -> None:
    """Kill the process that made the call, and no other."""
    status = Path(f"/proc/{call.pid}/status").read_text()
    os.kill(int(status.split("\nTgid:\t")[1].split("\n")[0]), signal.SIGKILL)


def _paths(pid: int, name: str, arguments: list[int]) -> Iterator[str]:
    if name in DESCRIPTOR_CALLS:
        descriptor = ctypes.c_int(arguments[DESCRIPTOR_CALLS[name]]).value
        yield str(Path(f"/proc/{pid}/fd/{descriptor}").readlink())
        return
    for folder, path in (PATH_CALLS[name], *([SECOND_PATHS[name]] if name in SECOND_PATHS else [])):
        yield os.path.normpath(os.path.join(_folder(pid, folder, arguments), _text(pid, arguments[path])))  # noqa: PTH118


def _folder(pid: int, argument: int | None, arguments: list[int]) -> str:
    descriptor = AT_FDCWD if argument is None else ctypes.c_int(arguments[argument]).value
    return str(Path(f"/proc/{pid}/cwd" if descriptor == AT_FDCWD else f"/proc/{pid}/fd/{descriptor}").readlink())


def _text(pid: int, address: int) -> str:
    """Return the path at an address of the process."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        text = b""
        while b"\0" not in text:
            place = address + len(text)
            memory.seek(place)
            text += memory.read(4096 - place % 4096)  # up to the end of the page: the next may not be there
    return os.fsdecode(text.split(b"\0", 1)[0])
