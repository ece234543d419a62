"""Marks that the mixins of transformers put on their tests, and a report of how many of them passed."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tra.runs.environment import environment

MARKS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "is_expert_parallel_test",
    "is_fsdp_test",
    "is_pipeline_test",
    "is_tensor_parallel_test",
    "is_training_test",
    "order",
    "torch_compile_test",
)
OUTCOMES = ("passed", "failed", "skipped")
SUITE = "test_mixins.py::"


def pytest_configure(config: pytest.Config) -> None:
    """Declare them, since unknown marks are errors here."""
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: set by the test mixins of transformers")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the outcomes of each class of tests, and the reasons of what was skipped, to `$TRANSFORMERS_REPORT`."""
    file = os.environ.get("TRANSFORMERS_REPORT")
    if not file or "PYTEST_XDIST_WORKER" in os.environ:
        return
    classes: dict[str, dict[str, Any]] = {}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            if (
                SUITE not in report.nodeid or type(report).__name__ != "TestReport"
            ):  # subtests have reports of their own
                continue
            name, test = report.nodeid.split(SUITE)[1].split("::")
            found = classes.setdefault(name, {**dict.fromkeys(OUTCOMES, 0), "reasons": {}, "failures": []})
            found[outcome] += 1
            if outcome == "failed":
                found["failures"].append(test)
            if outcome == "skipped":
                reason = report.longrepr[2].removeprefix("Skipped: ")
                found["reasons"].setdefault(reason, []).append(test)
    for found in classes.values():
        counted = Counter({reason: len(tests) for reason, tests in found["reasons"].items()})
        found["reasons"] = {reason: sorted(found["reasons"][reason]) for reason, _ in counted.most_common()}
    facts = {"transformers": transformers.__version__, "environment": environment(torch.device("cpu"))}
    Path(file).write_text(json.dumps(facts | {"classes": dict(sorted(classes.items()))}, indent=1) + "\n")
