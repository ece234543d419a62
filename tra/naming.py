"""How the package speaks of names it doesn't know."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """One line: what is unknown, and the nearest known name; or all of them where none is near."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    answer = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return f"unknown {kind} {name!r}: {answer}"
