"""The files of a run are read without torch, and the intervals are what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tra.runs import bootstrap_interval, environment, perplexity_ratio
from tra.runs.environment import cpu_name
from tra.runs.failures import pip_install

WITHOUT_TORCH = """
import importlib, pkgutil, sys
sys.modules["torch"] = None
import tra.runs, tra.report
for package in (tra.runs, tra.report):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""


def test_runs_and_reports_need_no_torch() -> None:
    """Every module of both, in a process of its own."""
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)


def test_a_run_is_read_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tra.runs import RunFolder, put_row, read_rows, write_arrays\n"
        "run = RunFolder.open('flipflop-tra')\n"
        f"put_row(run.__class__(__import__('pathlib').Path({str(tmp_path)!r})).evaluation_file, {{'a': 1}}, ('a',))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "eval.jsonl").read_text() == '{"a": 1}\n'


def test_the_environment_has_the_cpu() -> None:
    name = environment(torch.device("cpu"))["cpu"]
    assert name
    assert name == cpu_name()


def test_a_missing_package_is_installed_by_its_own_name() -> None:
    """An extra of this package would install it anew, in place of a checkout."""
    assert pip_install("ray>=2.40") == f"{sys.executable} -m pip install 'ray>=2.40'"
    for file in (Path(__file__).parents[1] / "tra").rglob("*.py"):
        assert "pip install 'threshold" not in file.read_text(), file


def test_a_ratio_is_paired_by_document() -> None:
    """Documents differ a hundredfold, but one model is always 0.1 nats worse: no doubt is left."""
    ours = np.array([[10.0 * n, 10] for n in range(1, 20)])
    worse = np.add(ours, [1.0, 0])
    assert perplexity_ratio(worse, ours) == pytest.approx((np.exp(0.1),) * 3)
    assert perplexity_ratio(ours, ours) == (1, 1, 1)


def test_equally_many_documents_are_resampled_alike() -> None:
    sums, counts = np.array([1.0, 2, 5]), np.array([1, 1, 2])
    low, high = bootstrap_interval(sums, counts)
    assert bootstrap_interval(2 * sums, counts) == pytest.approx((2 * low, 2 * high))
