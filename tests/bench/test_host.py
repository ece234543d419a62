"""`tra bench host` measures every contender, and says what its times are."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.slow import slow
from tra.bench import host
from tra.bench.host import Measured, Plan, bench_host, decoder_of, measure, token_step

CPU = torch.device("cpu")


def test_ratios_and_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a call of the one contender moves by 3 ms, of the other by 6."""
    now = itertools.count()
    clock = [0.0]
    monkeypatch.setattr(host.time, "perf_counter", lambda: clock[0])

    def call(milliseconds: int) -> None:
        next(now)
        clock[0] += milliseconds / 1e3

    things = [Measured("x", "rope", lambda: call(3)), Measured("x", "tra", lambda: call(6))]
    rope, ours = measure(things, CPU, Plan(calls=4, rounds=3, warm_up=2))
    assert (rope["us"], rope["ratio"]) == (3000.0, 1.0)
    assert (ours["us"], ours["ratio"]) == (6000.0, 2.0)
    assert next(now) == 2 * (2 + 4 * 3)


def test_decoding_begins_anew_when_its_room_is_full() -> None:
    for static in (False, True):
        step = token_step(decoder_of("tra", CPU, torch.float32), CPU, 4, static)
        outs = [step() for _ in range(9)]  # room for 4 more tokens
        assert torch.equal(outs[0], outs[4])
        assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("device", slow("cpu"))
def test_everything_is_measured(device: str) -> None:
    told: list[str] = []
    result = bench_host(torch.device(device), told.append, Plan(length=4, calls=1, rounds=1, warm_up=1))
    assert told == ["operator", "layer", "decoder of one layer", "one token"]
    assert "total time" in result["waits"]
    whats = {row["what"] for row in result["rows"]}
    for what in whats:
        contenders = [row["contender"] for row in result["rows"] if row["what"] == what]
        assert sorted(name == "tra" for name in contenders) == [False, True]
    assert len(whats) == 8
    assert all(row["us"] > 0 for row in result["rows"])


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits() -> None:
    result = bench_host(torch.device("cuda"), plan=Plan(rounds=5))
    assert result["waits"].startswith("none")
    assert all(row["us"] > 0 for row in result["rows"])
