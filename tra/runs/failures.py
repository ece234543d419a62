"""Explain failures of the machine in one line: missing packages and files, too little memory."""

from __future__ import annotations

import errno
import shlex
import sys

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that say that there is no room for a file."""

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "storage size calculation overflowed")
"""Parts of the texts that torch's errors have where memory is not enough, in lower case."""


def explain_failure(error: BaseException) -> str | None:
    """Return one line about a failure of the machine; None if the error may be a bug."""
    if isinstance(error, OSError):
        return _explain_file_error(error)
    if isinstance(error, RecursionError):
        return "something is nested too deeply to be read"
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        text = one_line(str(error))
        return f"there is not enough memory{f': {text[:300]}' if text else ''}"
    return None


def pip_install(requirement: str) -> str:
    """Return the command that adds a package to this Python, however this package was installed.

    It names the missing package, not an extra of this package, which would replace a checkout by a new installation.
    """
    return shlex.join([sys.executable, "-m", "pip", "install", requirement])


def one_line(text: str) -> str:
    """Return text with line breaks and control characters escaped, as `\\n`."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", errors="backslashreplace").decode() for c in text
    )


def _explain_file_error(error: OSError) -> str:
    reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
    file = "" if error.filename is None else f"{error.filename}: "
    if isinstance(error.filename, bytes):
        file = f"{error.filename.decode(errors='backslashreplace')}: "
    if error.errno in FULL_DISK:
        return f"{file}the disk is full ({reason})"
    return f"{file}{reason}"


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in OUT_OF_MEMORY)
