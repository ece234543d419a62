"""Start other Python processes, which import nothing that lies in the working folder."""

from __future__ import annotations

import sys
from pathlib import Path


def python_command(*arguments: str) -> list[str]:
    """Return the command of another Python process with these arguments.

    By itself, `python -m` looks for modules and for entry points in the working folder first, where runs and archives
    of others may lie. Only in a checkout that is not installed that is where this package is.
    """
    is_at_home = Path.cwd() == Path(__file__).resolve().parents[2]
    return [sys.executable, *([] if is_at_home else ["-P"]), *arguments]
