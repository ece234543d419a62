"""One sandbox for all tests of a process, and the counts at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import campaign
from tests.fuzz.command import RUNNING_FILE
from tests.fuzz.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox()
    yield made
    made.close()


@pytest.fixture(scope="session")
def export_sandbox() -> Iterator[Sandbox]:
    """A sandbox that also holds the run and the language model as transformers loads them."""
    made = Sandbox(with_exports=True)
    yield made
    made.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put a long run's shards in turn, so that one that is cut short has tried something of everything."""
    if campaign.TOTAL:
        items.sort(key=lambda item: str(getattr(item, "callspec", None) and item.callspec.id).rpartition("-")[2])


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["FUZZ_BEGUN"] = str(time.time())
        os.environ["FUZZ_STARTED"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        os.environ["FUZZ_PARTS"] = tempfile.mkdtemp(prefix="tra-fuzz-counts-")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write and show the counts of all processes. Workers of xdist, which come here too, leave theirs alone."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    parts = Path(os.environ.get("FUZZ_PARTS", "."))
    counts = campaign.merged_counts(parts) if "FUZZ_PARTS" in os.environ else {}
    campaign.write_report(parts)
    shutil.rmtree(parts, ignore_errors=True) if "FUZZ_PARTS" in os.environ else None
    for target, found in counts.items():
        terminalreporter.write_line(
            f"fuzz {target}: {', '.join(f'{number:,} {name}' for name, number in found.items())}"
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    RUNNING_FILE.unlink(missing_ok=True)
    if "FUZZ_PARTS" in os.environ:
        campaign.write_counts(Path(os.environ["FUZZ_PARTS"]))
