"""Serving against padded batches, in miniature."""

from __future__ import annotations

import pytest
import torch

from benchmarks.serving import Plan, bench_serving, draw_requests

SMALL = Plan("tiny", 16, 5, 2, (2, 90), (2, 9), 3, torch.float32)


def test_a_row_per_way() -> None:
    requests = draw_requests(SMALL)
    assert len({len(request.tokens) for request in requests}) > 2
    assert len({tuple(request.tokens[:3]) for request in requests}) == 1
    found = bench_serving(torch.device("cpu"), ("tra",), SMALL)
    assert [(row["mechanism"], row["way"]) for row in found["rows"]] == [("tra", "served"), ("tra", "padded")]
    for row in found["rows"]:
        assert row["tokens"] == sum(request.max_new_tokens for request in requests)
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"], rel=0.05)
