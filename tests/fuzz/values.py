"""Values that a user, a script or a damaged disk may bring: good ones, odd ones, absurd ones."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

HUGE_INTEGERS = (2**31, 2**63, 2**64, 10**18, -(2**63) - 1, 10**399)
INTEGERS = (-1, 0, 1, 2, 3, 5, 7, 8, 16, 100)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 5e-324, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", " ", "-", "--", "=", "a=b", "null", "ü", "\N{PILE OF POO}", "a\nb", "\t", "\x1b[2J", "<script>", "%s%n",
         "\udcff", "x" * 300, "../..", "NaN", "tra", "rope", "iid", "train", "0", "1e999", "[]", "{}",
         "[" * 3000, "9" * 400, "1" + "0" * 5000)  # fmt: skip

OWN_FILES = ("evil.py", "run/evil.py", "../beside/evil.py", "mine/own_mechanism.py", "linked.py", "renamed.py",
             "folder.py",
             "a.txt", "missing.py", "with space/own.py", "own_task.pyc", "", "\udcff.py",
             "x" * 300 + ".py")  # fmt: skip
OWN_NAMES = ("evil.py:Evil", "../beside/evil.py:Evil", "run/evil.py:Evil", "./evil.py:Evil", "evil.py:", "evil:Evil",
             "evil",
             "evil.Evil", "own_mechanism.py:DenseAttention", "own_mechanism.py:__loader__", "own_task.py:Task",
             "own_mechanism.py:Windowed", "mine/own_mechanism.py:Windowed", "linked.py:Windowed", "renamed.py:Windowed",
             "own_task.py:Reverse", "a\n.py:X", "\x1b[2J.py:X", ".py:X", "x.py:\udcff")  # fmt: skip
"""Names of files that lie about, and of what may be in them. Only a command line may name one to be imported."""
MEMORIES = ("calibrated",) * 4 + ("8", "1", "0", "-1", str(2**40), str(2**63 - 1), "run/windows.json",
            "text/windows.json",
            "bad.json", "run/config.json", "missing.json", "run", "x.json/y.json", "")  # fmt: skip

FOLDERS = ("run", "other", "part", "text", "alice", "cells", "link", "mine", "margin", "new", "new/deeper/still")
PATHS = (
    *FOLDERS, "store", "stores", "stores/train", "model", "flipflop-tra", "empty", "with space", "ünïcode", "dangling",
    "a.txt", "b.jsonl", "bad.json", "config.json", "cells.tar.gz", "suite.py", "notes.md", "attend.svg",
    "a.txt/below", "run/config.json", "run/model.safetensors", "run/attend.npz", "run/checkpoints", "store/tokens.bin",
    "new.html", "new.png", "new.tar.gz", "new.xz", "run/windows.json", "windows.json", "new.json",
    "own_mechanism.py", "ours", "run/", "./run", "run/../other", "missing/run", "", ".", "x" * 300,
    "y/" * 2000 + "z", "new\nline", "-run", "\udcff", "/proc/self/none", "/proc/1/x", "/dev/null", "/dev/full", "*",
    "hub:none/none", "suite.py:mine", "~",
)  # fmt: skip


def integers() -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from(INTEGERS), st.sampled_from(INTEGERS), st.sampled_from(HUGE_INTEGERS))


def numbers() -> st.SearchStrategy[Any]:
    return st.one_of(integers(), st.sampled_from(FLOATS))


def texts() -> st.SearchStrategy[str]:
    free = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0/"), max_size=12)
    return st.one_of(st.sampled_from(TEXTS), free)


def paths() -> st.SearchStrategy[str]:
    return st.one_of(st.sampled_from(FOLDERS), st.sampled_from(PATHS))


def number_texts() -> st.SearchStrategy[str]:
    """Return numbers as they stand on a command line, some of them none."""
    return st.one_of(
        numbers().map(_digits), st.sampled_from(("1e400", "0x10", "1_000", "٣", "1.5", "", "1e-999", "--1"))
    )


def _digits(number: Any) -> str:
    return "1" + "0" * 399 if number == 10**399 else repr(number)


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.one_of(st.none(), st.booleans(), numbers(), texts())
    return st.one_of(
        leaves,
        st.lists(leaves, max_size=3),
        st.dictionaries(st.sampled_from(("", "step", "split", "x", "name")), leaves, max_size=2),
        st.just("deep"),
    )


def as_json(value: Any) -> str:
    """Return JSON; "deep" is nested beyond what a parser's stack takes, 10**399 has 5,000 digits."""
    text = json.dumps(value)
    return text.replace('"deep"', "[" * 5000 + "]" * 5000).replace("1" + "0" * 399, "1" + "0" * 5000)
