"""Cells in an hour, in miniature."""

from __future__ import annotations

import pytest

from benchmarks.cells import bench_cells
from tests.suite.test_local import SMALL


@pytest.mark.slow
def test_cells_are_counted() -> None:
    found = bench_cells("cpu", jobs=(1, 2), number=2, name="demo", changes=(*SMALL, "train.steps=2"))
    assert [(row["jobs"], row["cells"]) for row in found["rows"]] == [(1, 2), (2, 2)]
    for row in found["rows"]:
        assert row["cells_per_hour"] == pytest.approx(3600 * 2 / row["seconds"], rel=0.05)
