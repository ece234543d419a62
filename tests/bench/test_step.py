"""Training steps side by side: processes that wait for each other, ratios, and a failure that doesn't stop the rest."""

from __future__ import annotations

import pytest
import torch

from tra.attention import MECHANISMS
from tra.bench.step import COST_SHAPES, SHAPES, Shape, bench_step, measure_step, run_config

SMALL = Shape("tiny", 2, 16)


@pytest.mark.parametrize("mechanism", list(MECHANISMS))
def test_every_mechanism_at_every_shape_is_a_run(mechanism: str) -> None:
    for shape in (*SHAPES, *COST_SHAPES):
        config = run_config(mechanism, shape)
        assert config.task.build().size("train") == shape.length
        assert (config.model.mechanism, config.train.batch_size) == (mechanism, shape.batch)
        assert (config.model.block, config.model.dropout) == (("authors", 0.01) if shape.paper else ("pre", 0.0))


def test_a_step_is_measured_after_it_is_ready() -> None:
    told = []
    row = measure_step("rope", SMALL, torch.device("cpu"), lambda: told.append(True))
    assert told == [True]
    assert row["step_ms"] > 0
    assert row["loss_is_finite"]


@pytest.mark.slow
def test_ratios_and_failures() -> None:
    rows = bench_step("cpu", ("tra", "rope", "sliderule"), (SMALL,))["rows"]
    tra, rope, unknown = rows
    assert rope["step_ratio"] == 1.0
    assert tra["step_ratio"] == pytest.approx(tra["step_ms"] / rope["step_ms"], abs=1e-3)
    assert "unknown mechanism 'sliderule'" in unknown["error"]
