"""Where tests find text: a small file of their own, and the real ones where they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SMALL_WIKITEXT = HERE / "wiki.valid.raw"
"""WikiText's raw form by hand: three articles, sections, a formula that looks like a heading, a title with a =."""

REAL = Path(os.environ.get("TRA_TEST_DATA", HERE.parents[2] / "shared" / "data"))


def real(path: str) -> Path:
    """A file of the real data; without it the test is skipped."""
    if not (REAL / path).exists():
        pytest.skip(f"needs {path}, which TRA_TEST_DATA or ../shared/data would hold")
    return REAL / path
