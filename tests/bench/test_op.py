"""The walk is lean and fast where it matters, measured."""

from __future__ import annotations

import pytest

from tra.bench.op import measure_apart


@pytest.mark.timing
def test_no_square_tensor_at_16k() -> None:
    """Forward and backward at 16,384 tokens, 4 heads of 64: one head's T × T map alone would take 1,024 MiB."""
    result = measure_apart("blockwise", 16_384, repeats=1)
    assert result.peak_mib < 1024 / 2


@pytest.mark.timing
def test_faster_than_the_definition_at_4k() -> None:
    reference, walk = (measure_apart(impl, 4096, repeats=2) for impl in ("reference", "blockwise"))
    assert walk.forward_ms < reference.forward_ms
    assert walk.total_ms < reference.total_ms
