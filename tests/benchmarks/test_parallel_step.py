"""The measurement of DDP and FSDP2 measures something."""

from __future__ import annotations

import pytest
import torch

from benchmarks.parallel_step import bench_parallel_step
from tra.bench.step import Shape


@pytest.mark.slow
def test_a_row_per_engine_and_losses_that_agree() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes that it starts
    try:
        result = bench_parallel_step(Shape("tiny", 4, 8), torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
    rows = {(row["processes"], row["kind"]): row for row in result["rows"]}
    assert set(rows) == {(1, "whole"), (1, "pieces"), (1, "layers"), (1, "fsdp"), (2, "ddp"), (2, "fsdp")}
    assert all(row["step_ms"] > 0 for row in rows.values())
    assert rows[1, "fsdp"]["losses"] == rows[1, "layers"]["losses"]
    assert result["fsdp_ratio"] > 0
    assert result["losses_agree"]
    assert not result["errors"]
