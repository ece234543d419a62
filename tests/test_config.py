"""Configs: presets are whole, overrides are checked, JSON goes both ways."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tra.attention import MECHANISMS
from tra.config import OptimConfig, RunConfig, differences
from tra.model import Decoder, DecoderConfig
from tra.presets import PRESETS, preset
from tra.runs import RunFolder
from tra.suite import Cell
from tra.text.task import Text


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds(name: str) -> None:
    config = preset(name)
    assert RunConfig.from_dict(config.to_dict()) == config
    task = config.task.build()
    with torch.device("meta"):
        model = Decoder(config.model)
    assert model.lm_head.out_features == task.vocab_size >= len(task.vocabulary)
    for split in task.splits:
        assert task.size(split) > 0


@pytest.mark.parametrize("name", ["flipflop", "copy", "induct", "instruct"])
def test_published_runs_have_the_paper_s_size_and_a_quick_sister(name: str) -> None:
    config = preset(name)
    model = config.model
    assert (model.n_layers, model.n_heads, model.d_model, model.block) == (4, 4, 256, "authors")
    assert model.dropout == 0.01
    expected = (20_000, 64) if name == "flipflop" else (100_000, 128)
    assert (config.train.steps, config.train.batch_size) == expected
    assert preset(f"{name}-quick").train.steps <= 5000


def test_the_published_language_model_and_its_sisters() -> None:
    config, quick = preset("wikitext"), preset("wikitext-quick")
    model = config.model
    assert (model.n_layers, model.n_heads, model.d_model, model.block) == (8, 8, 512, "authors")
    assert (model.vocab_size, model.dropout) == (50_304, 0.01)
    assert (config.train.steps, config.train.batch_size, config.task.build().size("train")) == (100_000, 64, 128)
    assert differences(config.to_dict(), quick.to_dict()) == ["model.dropout", "train.steps"]
    assert quick.train.steps == 15_000
    assert max(preset("text-demo").evaluate.windows) < len(Text().stream("valid").tokens)


def test_flipflop_is_judged_on_the_paper_s_test_sets() -> None:
    config = preset("flipflop")
    assert config.task.build().size("train") == 512
    assert {"iid": 16_000, "sparse": 160_000, "dense": 4_000}.items() <= config.evaluate.examples_of.items()


def test_overrides() -> None:
    config = preset("demo").override(
        ["train.steps=7", "model.mechanism=rope", "optim.clip=null", "optim.lr=1", "task.arguments.length=32"]
    )
    assert config.train.steps == 7
    assert config.model.mechanism == "rope"
    assert config.optim.clip is None
    assert config.optim.lr == 1.0
    assert config.task.build().size("train") == 32
    assert differences(preset("demo").to_dict(), config.to_dict()) == [
        "model.mechanism",
        "optim.clip",
        "optim.lr",
        "task.arguments.length",
        "train.steps",
    ]


def test_the_vocabulary_follows_the_task() -> None:
    assert preset("copy").override(["task.arguments.alphabet=10"]).model.vocab_size == 14
    assert preset("demo").override(["task.name=copy", 'task.arguments={"alphabet": 5}', "evaluate.splits=[]",
                                    'evaluate.examples_of={}']).model.vocab_size == 9  # fmt: skip


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.step=5", "unknown key 'train.step': did you mean 'train.steps'"),
        ("trian.steps=5", "unknown key 'trian'"),
        ("train.steps", "section.key=value"),
        ("train=5", "train is a section"),
        ("train.steps=many", "train.steps must be of type int, got 'many'"),
        ("train.steps=true", "train.steps must be of type int"),
        ("train.steps=0", "train.steps must be at least 1"),
        ("train.accumulate=3", "multiple of train.accumulate"),
        ("train.precision=fp8", "train.precision must be one of 'auto'"),
        ("model.mechanism=tro", "unknown mechanism 'tro': did you mean"),
        ("task.name=flipflip", "unknown task 'flipflip': did you mean 'flipflop'"),
        ("task.arguments.lenght=5", "unknown argument of flipflop 'lenght': did you mean 'length'"),
        ("task.arguments.length=long", "task.arguments.length must be of type int"),
        ("task.arguments.length=7", "even length"),
        ('evaluate.splits=["sparce"]', "unknown split of flipflop 'sparce': did you mean 'sparse'"),
        ("optim.lr=-1", "lr > 0"),
        ("optim.clip=0", "optim.clip must be above 0"),
        ("version=2", "has version 2, this tra reads up to 1"),
        ("version=true", "version must be of type int, got True"),
        ("optim.lr=NaN", "optim.lr must be a number of at most 64 bits, got nan"),
        ("optim.lr=Infinity", "optim.lr must be a number of at most 64 bits, got inf"),
        ("optim.clip=NaN", "optim.clip must be a number of at most 64 bits, got nan"),
        ("model.gate_bias=NaN", "model.gate_bias must be a number of at most 64 bits, got nan"),
        ("model.gate_bias=Infinity", "model.gate_bias must be a number of at most 64 bits, got inf"),
        ("optim.lr=-Infinity", "optim.lr must be a number of at most 64 bits, got -inf"),
        ("optim.lr=" + "9" * 400, "optim.lr must be a number of at most 64 bits, got 9999"),
        ("optim.lr=" + "9" * 5000, "optim.lr must be of type float, got '9999"),
        ("train.seed=" + "9" * 400, "train.seed must be a number of at most 64 bits, got 9999"),
        ("train.steps=5.0", "train.steps must be of type int, got 5.0"),
        ("train.steps=" + "[" * 100_000, r"train.steps must be of type int, got '\[\["),
        ("evaluate.windows=8", "evaluate.windows must be of type tuple, got 8"),
        ('evaluate.examples_of={"iid": "few"}', "evaluate.examples_of.iid must be of type int, got 'few'"),
        ("task.arguments.length=" + "[" * 500 + "]" * 500, "task.arguments.length must be of type int"),
        ("task=[]", "task is a section"),
        ("model.margin=-1", "margin must be at least 0, got -1.0"),
        ("model.margin=nan", "model.margin must be a number or inf, got 'nan'"),
        ("model.margin=NaN", "model.margin must be a number of at most 64 bits, got nan"),
        ("model.margin=-inf", "model.margin must be a number or inf, got '-inf'"),
        ("model.margin=true", "model.margin must be a number or inf, got True"),
        ("model.margin=null", "model.margin must be a number or inf, got None"),
        ("model.threshold=inf", "model.threshold must be of type float, got 'inf'"),
        ("model.threshold=-Infinity", "model.threshold must be a number of at most 64 bits, got -inf"),
    ],
)
def test_bad_overrides(assignment: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        preset("demo").override([assignment])
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for content, message in (
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ('{"task": {"name": "copy"}}', "incomplete"),
        ('{"task": 5}', "task must be a section"),
        ('{"step": 5}', "unknown key 'step'"),
        ('{"task": ' * 100_000, "is not JSON: maximum recursion depth"),
        ('{"version": ' + "9" * 5000 + "}", "is not JSON: Exceeds the limit"),
        (json.dumps(preset("demo").to_dict() | {"version": 99}), "version 99"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message) as caught:
            RunConfig.load(file)
        assert len(str(caught.value).splitlines()) == 1
        assert str(caught.value).startswith(str(file))
    with pytest.raises(ValueError, match="can't be read: Is a directory"):
        RunConfig.load(tmp_path)
    with pytest.raises(ValueError, match="there is no config file"):
        RunConfig.load(tmp_path / "none.json")


def strict_json(text: str) -> Any:
    """Return what a reader of JSON finds that knows no Infinity and no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("margin", [0.0, 2.0, math.inf])
def test_threshold_and_margin_survive_a_file_of_strict_json(margin: float, tmp_path: Path) -> None:
    config = preset("demo").override([f"model.margin={margin:g}", "model.threshold=-1"])
    assert (config.model.threshold, config.model.margin) == (-1.0, margin)
    run = RunFolder(tmp_path / "run")
    run.start(config, resume=False, overwrite=False)
    stored = strict_json(run.config_file.read_text())["model"]
    assert (stored["threshold"], stored["margin"]) == (-1.0, "inf" if margin == math.inf else margin)
    assert run.config() == config
    assert run.start(config, resume=True, overwrite=False) == config
    with pytest.raises(ValueError, match=r"another config; it differs in model\.margin"):
        run.start(config.override(["model.margin=7"]), resume=True, overwrite=False)


def test_a_config_of_a_former_version_has_neither_threshold_nor_margin() -> None:
    former = preset("demo").to_dict()
    del former["model"]["threshold"], former["model"]["margin"]
    assert RunConfig.from_dict(former) == preset("demo")
    assert (preset("demo").model.threshold, preset("demo").model.margin) == (0.0, 0.0)


def test_a_config_of_a_former_version_says_nothing_of_processes() -> None:
    """It loads, and the settings that came later stay out of a cell's digest, by which finished cells are found."""
    former = preset("demo").to_dict()
    del former["train"]["parallel"], former["train"]["checkpoint_activations"]
    config = RunConfig.from_dict(former)
    assert config == preset("demo")
    assert (config.train.parallel, config.train.checkpoint_activations) == ("auto", False)
    assert Cell("demo", config).digest == "abcfa41d"
    assert Cell("demo", config.override(["train.parallel=fsdp"])).digest != Cell("demo", config).digest


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_threshold_and_margin_are_refused_where_they_would_do_nothing(mechanism: str) -> None:
    has_them = mechanism in ("tra", "tra-threshold-only", "tra-plain-distance")
    for name, value in (("threshold", -1), ("margin", 2)):
        changes = [f"model.mechanism={mechanism}", f"model.{name}={value}"]
        if has_them:
            assert getattr(preset("demo").override(changes).model, name) == value
        else:
            with pytest.raises(ValueError, match=f"{mechanism} has no {name}: leave it at 0, got {value}"):
                preset("demo").override(changes)


def test_a_decoder_config_checks_threshold_and_margin() -> None:
    for changes, message in (
        ({"margin": -0.5}, "margin must be at least 0, got -0.5"),
        ({"margin": math.nan}, "margin must be at least 0, got nan"),
        ({"threshold": math.nan}, "threshold must be finite, got nan"),
        ({"threshold": -math.inf}, "threshold must be finite, got -inf"),
    ):
        with pytest.raises(ValueError, match=message):
            DecoderConfig(5, **changes)


def test_learning_rate_schedule() -> None:
    optim = OptimConfig(lr=2.0, warmup=0.05)
    rates = [optim.rate(step, 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(2.0 / 50)
    assert rates[49] == rates[50] == 2.0
    assert rates[525] == pytest.approx(1.0)
    assert 0 < rates[999] < 1e-4
    assert all(a <= b for a, b in itertools.pairwise(rates[:51]))
    assert all(a >= b for a, b in itertools.pairwise(rates[50:]))
    flat = OptimConfig(lr=2.0, warmup=0.0, decay="none")
    assert {flat.rate(step, 10) for step in range(10)} == {2.0}
