"""One fault of each kind for each command; `make chaos` runs all of them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_faults_lose_nothing() -> None:
    """In a process of its own, since one that has used torch's threads can't be forked."""
    command = [sys.executable, "-m", "tests.chaos", "--short"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "this needs Linux" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
