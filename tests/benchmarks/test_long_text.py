"""Time and memory of a long text: blocks, their summary, and the errors of a window that is long enough or is not."""

from __future__ import annotations

import pytest
import torch

from benchmarks import long_text
from benchmarks.long_text import Block, bench_long_text, summary, whole_text
from tra.runs import RunFolder

CPU = torch.device("cpu")


def test_a_run_reads_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "CHUNK", 50)
    run = RunFolder.open("flipflop-tra")
    wide, narrow = (bench_long_text(run, CPU, asked=asked, tokens=600, block=100)["rows"][0] for asked in ("300", "2"))
    text = whole_text(run, 600, 0)
    assert wide["scored"] == int(text.loss_mask.sum()) > 30
    assert wide["right"] == 1.0
    assert wide["nats"] < 0.01
    assert narrow["right"] < 0.9
    assert narrow["cache_bytes"] < wide["cache_bytes"]
    found = bench_long_text(run, CPU, asked="20", tokens=60, block=20, generates=True)
    assert found["rows"][0]["way"] == "generated"
    assert len(found["blocks"]["us_per_token"]) == 3


def test_the_summary_by_hand() -> None:
    """Windows of 15 tokens are full after two blocks of 10; a last block of 5 tokens is not compared."""
    times = [9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 9.0]
    blocks = [Block(time / 1e5, 100 + n, 2.0, n % 2, 1) for n, time in enumerate(times)]
    found = summary(blocks, 65, 10, 15)
    assert (found["us_per_token_first"], found["us_per_token_last"]) == (1.0, 4.0)
    assert found["last_over_first_tenth"] == 4.0
    assert (found["memory_first"], found["memory_last"]) == (102, 106)
    assert (found["right"], found["nats"], found["scored"]) == (round(3 / 7, 6), 2.0, 7)
    with pytest.raises(ValueError, match="65 tokens are too few: windows of 60 must be full"):
        summary(blocks, 65, 10, 60)


def test_other_runs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--tokens must be at least 2,000, got 10"):
        long_text.main(["flipflop-tra", "--tokens", "10"])
