"""Generation is measured from end to end, whatever machine there is."""

from __future__ import annotations

import json

import pytest
import torch

from tra.bench.generate import ON_CPU, ON_GPU, Plan, bench_generate, measure_generation
from tra.cli.main import parse
from tra.model import Decoder, DecoderConfig

CPU = torch.device("cpu")
SMALL = Plan("tiny", 16, (1, 2), (3, 9), 4, torch.float32, (False,), 1)


def test_a_row_per_case() -> None:
    result = bench_generate(CPU, ("tra", "rope"), SMALL)
    assert [(row["mechanism"], row["batch"], row["prompt"], row["graph"]) for row in result["rows"]] == [
        (mechanism, batch, prompt, False) for mechanism in ("tra", "rope") for batch in (1, 2) for prompt in (3, 9)
    ]
    assert result["weights"] == "random, float32"
    assert result["environment"]["torch"] == torch.__version__
    for row in result["rows"]:
        assert row["step_ms"] > 0
        assert row["prefill_ms"] > 0
        # end to end: at least the prompt and the second half, of two steps
        assert row["tokens_per_second"] < 1e3 * row["batch"] * 4 / (row["prefill_ms"] + row["step_ms"])


def test_times_are_of_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only reading a prompt (50 ms) and a step (2 ms) move."""
    now, model = 0.0, Decoder(DecoderConfig.tiny(16, d_model=16)).eval()

    def spend(_layer: object, given: tuple[torch.Tensor, ...]) -> None:
        nonlocal now
        now += 0.002 if given[0].shape[1] == 1 else 0.05

    model.embed_tokens.register_forward_pre_hook(spend)
    monkeypatch.setattr("tra.bench.generate.time.perf_counter", lambda: now)
    found = measure_generation(model, 3, 5, 8, False, CPU, 2)
    assert found == {"prefill_ms": 50.0, "step_ms": 2.0, "tokens_per_second": 375.0}  # 24 tokens in 64 ms


def test_a_failure_stops_nothing() -> None:
    first, second = bench_generate(CPU, ("cope", "rope"), SMALL._replace(batches=(1,), prompts=(3,)))["rows"]
    assert "cope can't use a static cache" in first["error"]
    assert second["step_ms"] > 0
    (row,) = bench_generate(CPU, ("tra",), SMALL._replace(batches=(1,), prompts=(3,), graphs=(True,)))["rows"]
    assert "graph=True needs a static cache" in row["error"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["bench", "generate", "--device", "cpu", "--only", "rope", "--json"])() == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == len(ON_CPU.batches) * len(ON_CPU.prompts)
    assert {row["mechanism"] for row in rows} == {"rope"}
    with pytest.raises(ValueError, match="did you mean 'rope'"):
        parse(["bench", "generate", "--only", "rop"])()
    with pytest.raises(ValueError, match="Unrecognized arguments: x"):
        parse(["bench", "generate", "x"])()


def test_what_a_gpu_would_measure() -> None:
    with torch.device("meta"):
        model = Decoder(getattr(DecoderConfig, ON_GPU.size)(ON_GPU.vocabulary))
    assert (model.config.n_layers, model.config.d_model, ON_GPU.vocabulary % 64) == (8, 512, 0)
    assert (ON_GPU.batches, ON_GPU.prompts, ON_GPU.new) == ((1, 32), (128, 4096, 16_384), 128)
