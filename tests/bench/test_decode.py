"""What a GPU's benchmark of decoding would measure, in miniature: in the interpreter, with a clock of our own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import decode_sweep
from benchmarks.decode_trained import bench_decode_trained
from tra.bench import decode as bench
from tra.bench.decode import GATES, LAYOUTS, MIN_CALLS, SDPA, SHAPES, Shape, bench_decode, check
from tra.bench.inputs import SHIPPED
from tra.cli.main import parse
from tra.ops.triton import decode
from tra.runs import RunFolder
from tra.text.task import Stream

CPU = torch.device("cpu")
SMALL = Shape(1, 4, 2, 16)
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there the command itself runs"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton", "ignore::RuntimeWarning"),
]


class Clock:
    """Calls once; what comes first takes 1 ms, what comes next 2 ms, and so on."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.asked: list[int] = []
        self.outputs: list[object] = []

    def __call__(self, call: Callable[[int], object], number: int) -> dict[str, float]:
        self.outputs.append(call(number - 1))
        self.asked.append(number)
        return {"ms": float(next(self.numbers))}


@pytest.fixture
def quick_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correctness on few keys."""
    few, small = decode_sweep.mismatches, {"draws": 1, "heads": 1, "length": 16, "content": "exact"}
    monkeypatch.setattr(bench, "check", lambda shape, device, dtype: check(shape, device, dtype, context=100))
    monkeypatch.setattr(decode_sweep, "mismatches", lambda rows, **given: few(rows, **(given | small)))


@pytest.mark.slow
def test_the_rule_is_kept_and_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(SMALL, CPU, torch.float16, context=1100)
    assert list(found) == [name + walk for name in GATES for walk in ("", ", full walk")]
    assert all(0 < ratio <= 1 for ratio in found.values())
    original = decode.decode_attention
    monkeypatch.setattr(decode, "decode_attention", lambda *args, **given: original(*args, **given) * 1.01)
    with pytest.raises(RuntimeError, match="nothing is measured"):
        check(SMALL, CPU, torch.float16, context=100)


def test_rows_and_ratios(quick_check: None) -> None:
    clock = Clock()
    found = bench_decode(CPU, shapes=(SMALL,), contexts=(40, 70), dtype=torch.float16, timer=clock)
    assert max(found["check"]["(1, 4, 2, 16)"].values()) <= 1
    rows = found["rows"]
    n_rows = len(GATES) + 1 + len(SDPA), 2 + len(SDPA)
    layouts = [x for layout, number in zip(LAYOUTS, n_rows, strict=True) for x in [layout] * number]
    assert [(row["context"], row["layout"]) for row in rows] == [(n, layout) for n in (40, 70) for layout in layouts]
    for context in (40, 70):
        here = [row for row in rows if row["context"] == context]
        tokens_first, heads_first = (
            {(row["contender"], row.get("gates")): row for row in here if row["layout"] == layout} for layout in LAYOUTS
        )
        all_walk = {("tra, full walk", None)} | {(x, None) for x in SDPA}
        assert set(tokens_first) == {("tra", name) for name in GATES} | all_walk
        assert set(heads_first) == {("tra", "init")} | all_walk
        best = min(row["ms"] for row in here if row["contender"] in SDPA and "ms" in row)
        for row in here:
            if "ms" in row:
                assert row["times_sdpa"] == pytest.approx(best / row["ms"], abs=1e-3)
            else:
                assert row["error"]
        assert "error" in heads_first["SDPA cuDNN", None]  # which no CPU has
    assert set(clock.asked) == {MIN_CALLS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_contenders_see_the_same_keys(layout: str) -> None:
    """The last call has the last window; PyTorch's, over all of it, with heads grouped as ours."""
    given = bench.make_inputs(SMALL, 40, CPU, torch.float16, layout)
    assert (given.key.stride(1) < given.key.stride(2)) == (layout == "tokens first")
    assert given.windows == 2
    first, last = given.window(0), given.window(1)
    assert torch.equal(given.window(2)[1], first[1])
    assert not torch.equal(first[1], last[1])
    assert first[1].shape == (1, 2, 40, 16)
    out = bench.sdpa_calls(given)["SDPA"](1)
    key, value = (x.double().repeat_interleave(2, 1) for x in last[1:3])
    weights = (given.query.double() @ key.mT / 4).softmax(-1)
    torch.testing.assert_close(out.double(), weights @ value, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_what_does_not_fit_is_said(quick_check: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_too_large", lambda *_: "needs 999 GiB, 1 GiB are free")
    found = bench_decode(CPU, shapes=(SMALL,), contexts=(40,), dtype=torch.float16, timer=Clock())
    assert [row["layout"] for row in found["rows"]] == list(LAYOUTS)
    for row in found["rows"]:
        assert row["error"] == "needs 999 GiB, 1 GiB are free"
        assert row["context"] == 40
        assert "times_sdpa" not in row


class Properties:
    multi_processor_count = 132
    L2_cache_size = 50 << 20


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("context", bench.CONTEXTS)
def test_windows_exceed_the_cache(shape: Shape, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even of the keys that a head reads which forgets."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    windows = bench.windows_for(shape, context, torch.device("cuda"))
    least = {1: 4096, 32: 256}[shape.batch]
    assert windows * shape.bytes_of(min(context, least)) >= 4 * Properties.L2_cache_size
    assert shape.bytes_of(context + (windows - 1) * min(context, bench.MAX_STEP)) < 40 << 30


@pytest.mark.slow
def test_a_trained_model(quick_check: None) -> None:
    run, clock = RunFolder.open(SHIPPED), Clock()
    tokens = np.random.default_rng(0).integers(0, 4, 100)
    stream = Stream("made up", tokens, np.zeros((1, 3), np.int64), "bytes", 0)
    found = bench_decode_trained(CPU, run, stream, contexts=(64, 100, 200), dtype=torch.float16, timer=clock)
    assert (found["run"], found["text"]) == (SHIPPED, "made up")
    rows = [row for row in found["rows"] if row["contender"] == "tra"]
    assert [(row["context"], row["layer"]) for row in rows] == [(64, layer) for layer in range(4)] + [
        (100, layer) for layer in range(4)
    ]
    assert all("times_sdpa" in row and row["heads"] == 4 and row["width"] == 64 for row in rows)
    (output,) = [x for x in clock.outputs[:1] if isinstance(x, Tensor)]
    assert output.shape == (1, 4, 1, 64)
    assert output.isfinite().all()


@pytest.mark.slow
def test_sweep(quick_check: None) -> None:
    lines: list[str] = []
    found = decode_sweep.sweep(
        CPU, rows=(16, 32), pieces=(32, 64), warps=(4,), cases=((SMALL, 100, "init"), (SMALL, 100, "full")),
        dtype=torch.float16, timer=Clock(), show=lines.append,
    )  # fmt: skip
    assert len(found) == len(lines) == 8
    assert [row["ms"] for row in found] == list(range(1, 9))
    assert all(row["keys_kept_otherwise"] == 0 for row in found)
    assert "rows 16, piece 32, warps 4, stages 3, ms 1.0" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--device", "cpu"], "bench decode measures the kernels, which need a GPU"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        parse(["bench", *arguments])()
