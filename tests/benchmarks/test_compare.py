"""Two results side by side, the figure, and what the GPU's benchmark would measure."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import compare as script
from benchmarks import speed_figure, trained
from benchmarks.compare import compare
from tra.bench.inputs import SHIPPED, Case, make_inputs, trained_inputs
from tra.bench.kernels import cases
from tra.model import Decoder
from tra.presets import preset
from tra.runs import RunFolder
from tra.tasks import FlipFlop

CPU = torch.device("cpu")
ROWS = [
    {"contender": name, "mode": mode, "width": 64, "length": length, "gates": gates, "content": "dense",
     "batch": 1, "heads": 8, "ms": 1.0 + length / 1e4, "fastest_ms": 1.0, "peak_mib": 100}
    for name, gates in (("tra", "init"), ("tra", "-0.05"), ("SDPA flash", "init"))
    for mode in ("forward", "forward and backward")
    for length in (4096, 16_384)
]  # fmt: skip
RESULT = {"environment": {"device": "a GPU"}, "rows": ROWS}


def changed(**measures: float) -> dict:  # type: ignore[type-arg]
    result = copy.deepcopy(RESULT)
    result["rows"][3].update(measures)
    return result


def test_compare_finds_what_is_worse() -> None:
    changes = compare(RESULT, changed(ms=ROWS[3]["ms"] * 1.2, fastest_ms=9.0))
    assert len(changes) == 2 * len(ROWS)
    (worse,) = [change for change in changes if change.is_worse]
    assert worse.measure == "ms"
    assert worse.ratio == pytest.approx(1.2)
    assert "16384" in worse.what
    assert not any(change.is_worse for change in compare(RESULT, changed(ms=ROWS[3]["ms"] * 1.05)))


def test_compare_refuses_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="different devices: a GPU and another"):
        compare(RESULT, RESULT | {"environment": {"device": "another"}})
    with pytest.raises(ValueError, match="no case in common"):
        compare(RESULT, RESULT | {"rows": [ROWS[0] | {"width": 128}]})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, bad = (tmp_path / name for name in ("old.json", "new.json", "bad.json"))
    old.write_text(json.dumps(RESULT))
    new.write_text(json.dumps(changed(ms=99.0)))
    bad.write_text("{}")
    assert script.main([str(old), str(old)]) == 0
    assert script.main([str(old), str(new)]) == 1
    assert "1 of 24 are more than 10 % worse" in capsys.readouterr().out
    assert speed_figure.main([str(old)]) == 0
    assert old.with_suffix(".png").stat().st_size > 10_000
    log, without = tmp_path / "log.json", old.with_suffix(".png").read_bytes()
    log.write_text(json.dumps(RESULT | {"rows": [row | {"content": "trained"} for row in ROWS]}))
    assert speed_figure.main([str(old), "--trained", str(log)]) == 0
    assert old.with_suffix(".png").read_bytes() != without


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (script.main, ["old.json", "bad.json"], "is no result of"),
        (script.main, ["old.json", "none.json"], "does not exist"),
        (speed_figure.main, ["none.json"], "does not exist"),
        (trained.main, ["flipflop-tra", "nowhere", "--device", "cpu"], "the kernels, which need a GPU"),
    ],
)
def test_bad_arguments(
    main: Callable[[list[str]], int],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.json").write_text(json.dumps(RESULT))
    Path("bad.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        main(arguments)


@pytest.mark.parametrize(("main", "arguments"), [(script.main, ["old.json"]), (trained.main, ["flipflop-tra"])])
def test_missing_arguments(main: Callable[[list[str]], int], arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


def test_cases_differ_and_have_their_kept_keys() -> None:
    assert len(set(cases())) == len(cases())
    for content, low, high in (("dense", 0.45, 0.55), ("sparse", 0.005, 0.02), ("null rows", 0.44, 0.54)):
        inputs = make_inputs(Case(64, 1024, "init", content), CPU)
        query, key = inputs.query[0, 0].float(), inputs.key[0, 0].float()
        kept = query @ key.T > 0
        assert low < float(kept.float().mean()) < high
        assert bool((~kept.any(1))[::64].all()) == (content == "null rows")


def test_inputs_of_a_trained_model() -> None:
    drawn = FlipFlop(202).sample("iid", 1, torch.Generator().manual_seed(0))
    inputs = trained_inputs(RunFolder.open(SHIPPED), drawn.tokens[:, :200])
    assert inputs.query.shape == (4, 4, 200, 64)
    assert inputs.query.dtype == torch.bfloat16
    assert bool((inputs.log_forget < 0).all())


def test_a_rival_has_no_gates_to_measure(tmp_path: Path) -> None:
    config = preset("demo").override(["model.mechanism=rope", "model.d_model=16"])
    run = RunFolder(tmp_path)
    run.start(config, resume=True, overwrite=False)
    run.save_weights(Decoder(config.model), 0)
    with pytest.raises(ValueError, match=r"the kernels are TRA.s, but .* is of rope"):
        trained_inputs(run, torch.zeros(1, 4, dtype=torch.int64))
