"""The command as a person meets it: in processes of its own."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tra as tra_package
from tests.slow import slow
from tra.cli.bench import MEASUREMENTS
from tra.cli.display import TrainingDisplay, metric_parts, results_table
from tra.cli.main import VERBS, parse
from tra.cli.options import Parser, parse_duration
from tra.evaluation.exact_match import SplitResult
from tra.presets import PRESETS, preset
from tra.suite import SUITES
from tra.training.trainer import Progress


def tra(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "tra", *arguments], capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


TINY = ("model.d_model=16", "model.n_layers=1", "task.arguments.length=16", "train.batch_size=4", "train.steps=3")


def train_tiny(folder: Path) -> None:
    done = tra("train", "--preset", "demo", *TINY, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "step 3/3 loss" in done.stdout
    assert "done after 3 steps: run (next: tra evaluate run)" in done.stdout


def test_train_evaluate_and_report(tmp_path: Path) -> None:
    train_tiny(tmp_path)
    rows = tra("evaluate", "run", "--examples", "5", "--splits", "iid", "4x", "--json", cwd=tmp_path)
    parsed = [json.loads(line) for line in rows.stdout.splitlines()]
    assert [row["split"] for row in parsed] == ["iid", "4x"]
    assert all(row["examples"] == 5 for row in parsed)
    reported = tra("report", "run", "--out", "report", cwd=tmp_path)
    assert reported.returncode == 0, reported.stderr
    assert (tmp_path / "report" / "exact-match.png").is_file()


@pytest.mark.slow
def test_evaluate_every_split_and_look_inside(tmp_path: Path) -> None:
    train_tiny(tmp_path)
    shown = tra("evaluate", "run", "--examples", "5", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "16x" in shown.stdout
    looked = tra("evaluate", "run", "--examples", "2", "--splits", "iid", "--diagnose", cwd=tmp_path)
    assert looked.returncode == 0, looked.stderr
    assert "attention, mean over layers and heads" in looked.stdout
    assert json.loads((tmp_path / "run" / "diagnose.jsonl").read_text())["split"] == "iid"


def test_a_config_file_instead_of_a_preset(tmp_path: Path) -> None:
    config = preset("demo").override(TINY)
    (tmp_path / "my.json").write_text(json.dumps(config.to_dict()))
    done = tra("train", "--config", "my.json", "train.seed=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs/flipflop-tra/config.json").read_text())["train"]["seed"] == 4


PIPED: dict[str, Any] = {"capture_output": True, "text": True, "check": False}


@pytest.mark.parametrize("verb", [(), *((verb,) for verb in VERBS)])
def test_help(verb: tuple[str, ...]) -> None:
    """Every verb and every option is explained, without torch and at once."""
    code = """
import sys, time
from tra.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
    assert time.process_time() < 0.5
"""
    shown = subprocess.run([sys.executable, "-c", code, *verb, "--help"], env=os.environ | {"COLUMNS": "80"}, **PIPED)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(" ".join(("usage: tra", *verb)))
    assert max(map(len, shown.stdout.splitlines())) <= 80
    if not verb:
        for name, (_, line) in VERBS.items():
            assert re.search(rf"^  {name} +{re.escape(line)}$", shown.stdout, re.M)


@pytest.mark.parametrize("verb", VERBS)
def test_every_argument_is_explained(verb: str) -> None:
    module = importlib.import_module(VERBS[verb][0])
    parser = Parser(f"tra {verb}", module.DESCRIPTION)
    module.add_arguments(parser)
    for action in parser._actions:
        assert len(action.help or "") > 10 or action.help == "see above"
        assert action.metavar or action.choices or action.nargs == 0, f"{action.dest} has no metavar"


@pytest.mark.parametrize(("verb", "names"), [("train", PRESETS), ("suite", SUITES), ("bench", MEASUREMENTS)])
def test_help_names_what_there_is(verb: str, names: Iterable[str]) -> None:
    description = importlib.import_module(VERBS[verb][0]).DESCRIPTION
    for name in names:
        assert re.search(rf"[\s,]{name}[\s,]", description), name


def parsed(*arguments: str) -> dict[str, Any]:
    call = parse(arguments)
    assert isinstance(call, functools.partial)
    return vars(call.args[0])


def test_positional_arguments_stand_anywhere() -> None:
    for arguments in (
        ("train.steps=5", "train.seed=1", "--out", "x", "--resume", "--preset", "demo"),
        ("--preset", "demo", "--out", "x", "train.steps=5", "train.seed=1", "--resume"),
        ("train.steps=5", "--out=x", "train.seed=1", "--preset", "demo", "--resume"),
    ):
        found = parsed("train", *arguments)
        assert (found["preset"], found["out"], found["resume"]) == ("demo", Path("x"), True)
        assert found["changes"] == ["train.steps=5", "train.seed=1"]
    found = parsed("attend", "a", "--rows", "0", "5", "b", "--layers", "1", "2", "--heads", "-1")
    assert (found["runs"], found["rows"], found["layers"], found["heads"]) == (["a", "b"], [0, 5], [1, 2], [-1])
    assert parsed("bench", "--json", "step")["what"] == parsed("bench", "step", "--json")["what"] == "step"
    assert parsed("bench")["what"] == "op"
    found = parsed("evaluate", "run", "--overlap", "none", "half", "--windows", "8", "--windows", "16")
    assert (found["overlap"], found["windows"]) == (["none", "half"], [8, 16])


def test_values_may_begin_with_a_dash() -> None:
    for text in ("-x", "-", "--prompter", "- a b"):
        assert parsed("generate", "run", "--prompt", text, "--seed", "-3")["prompt"] == text
    assert parsed("generate", "run", "--temperature", "-1e-3")["temperature"] == -1e-3
    assert parsed("generate", "run", "--stop=-x", "--stop", "y", "z")["stop"] == ["-x", "y", "z"]
    with pytest.raises(ValueError, match="argument --prompt: expected one argument"):
        parse(["generate", "run", "--prompt", "--json"])
    with pytest.raises(ValueError, match="argument --out: expected one argument"):
        parse(["train", "--out", "--resum"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a verb: demo, train"),
        (("--versio",), "unknown option '--versio'"),
        (("train", "--res"), "Unrecognized options: --res: did you mean --resume?"),
        (("train", "a=1", "--overwrit=5", "b=2"), "Unrecognized options: --overwrit: did you mean --overwrite?"),
        (("train", "--xyz"), "Unrecognized options: --xyz (tra train --help)"),
        (("export", "a", "b", "c"), "Unrecognized arguments: c"),
        (("export", "a"), "Missing from tra export: FOLDER"),
        (("demo", "--seed", "x"), "argument --seed: invalid int value: 'x'"),
        (("suite", "walk"), "invalid choice 'walk'"),
    ],
)
def test_what_does_not_parse_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse(arguments)
    assert len(str(caught.value).splitlines()) == 1


METRICS = {"loss": 3.2107, "accuracy": 0.31, "exact": 0.0, "tokens_per_second": 12_345}
HEADS = {"kept": [[0.5, 0.7]] * 4, "null": [[0.0, 0.1]] * 4}


def test_metrics_in_words() -> None:
    assert metric_parts(METRICS) == ["loss 3.2107", "accuracy 0.310", "exact 0.000", "12k tokens/s"]
    assert metric_parts(METRICS, is_text=True)[2] == "perplexity 24.8"
    assert metric_parts(METRICS | {"loss": 800.0}, is_text=True)[2] == "perplexity inf"
    kept = "kept per layer 0.60 0.60 0.60 0.60, null 0.05 0.05 0.05 0.05"
    assert metric_parts(METRICS | HEADS)[4] == kept
    assert metric_parts(METRICS | HEADS | {"counted": HEADS["kept"]})[4:] == [kept]  # without a margin
    counted = {"counted": [[0.25, 0.35]] * 4}
    assert metric_parts(METRICS | HEADS | counted)[4:] == [kept, "counted 0.30 0.30 0.30 0.30"]


def test_four_runs_fit_on_eighty_columns() -> None:
    result = SplitResult("sparse", 1024, 1024, 500, 0.956, 0.934, 0.971, 0.99, 900, 0, "float32", "cpu", 1.0)
    screen = io.StringIO()
    names = ("tra", "tra, margin 2", "rope", "forgetting")
    Console(file=screen, width=80).print(results_table({name: [result] for name in names}))
    shown = screen.getvalue()
    assert "…" not in shown
    assert shown.count("(0.934-0.971)") == 4
    assert all(name in shown.splitlines()[1] for name in names)
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("width", "metrics"),
    [
        (70, "loss 3.2107"),
        (80, "loss 3.2107 accuracy 0.310"),
        (110, "loss 3.2107 accuracy 0.310 exact 0.000 12k tokens/s"),
        (200, "loss 3.2107 accuracy 0.310 exact 0.000 12k tokens/s kept per layer 0.60"),
    ],
)
def test_a_narrow_terminal_shows_step_count_and_time_left(
    width: int, metrics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        "tra.cli.display.Console", lambda **_: Console(file=screen, width=width, force_terminal=True, color_system=None)
    )
    with TrainingDisplay("runs/flipflop-tra") as display:
        for step in (8_000, 8_001):
            display(Progress(step, 20_000, METRICS | HEADS))
    shown = next(line for line in reversed(screen.getvalue().splitlines()) if "flipflop" in line)
    assert metrics in shown
    assert " 8001/20000 " in shown
    assert re.search(r"-:--:--|\d:\d\d:\d\d", shown)
    assert "…" not in shown


@pytest.mark.parametrize(("steps", "seconds", "is_said"), [(20_000, 3.0, True), (1000, 3.0, False)])
def test_hours_on_a_cpu_are_announced_once(
    steps: int, seconds: float, is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(number * seconds for number in range(100))
    monkeypatch.setattr("tra.cli.display.time.monotonic", lambda: next(clock))
    with TrainingDisplay("run", on_cpu=True) as display:
        for step in range(1, 6):
            display(Progress(step, steps))
    said = " ".join(capsys.readouterr().err.split())
    line = (
        "run: step 3 of 20,000, about 17 hours to go on this CPU; the presets demo and text-demo, and those that end in"
    )
    assert said.count("hours to go") == is_said
    assert (line in said) == is_said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--preset", "demo", "train.stepz=1"), "did you mean 'train.steps'"),
        (("trian",), "unknown verb 'trian': did you mean 'train'?"),
        *slow(
            (("train",), "say what to train: --preset"),
            (("train", "--preset", "flipflip"), "unknown preset 'flipflip': did you mean 'flipflop'"),
            (("train", "--preset", "demo", "task.name=cpy"), "unknown task 'cpy': did you mean 'copy'"),
            (("train", "--preset", "demo", "task.arguments.length=9"), "even length"),
            (("train", "--preset", "demo", "--config", "x.json"), "either --preset or --config"),
            (("train", "--config", "none.json"), "there is no config file none.json"),
            (("train", "--preset", "demo", "--time-limit", "soon"), "a duration reads 90s, 9m or 1h30m"),
            (("train", "--preset", "demo", "--out", "exists"), "exists already"),
            (("train", "--resume", "--out", "none"), "there is no run to resume"),
            (("train", "--preset", "demo", "--device", "gpu"), "unknown device 'gpu'"),
            (("train", "--config", "newer.json"), "version 99"),
            (("evaluate", "none"), "none doesn't exist; runs that ship"),
            (("evaluate", "exists"), "no model.safetensors yet"),
            (("evaluate", "flipflop-tra", "--splits", "dens"), "did you mean 'dense'"),
            (("evaluate", "flipflop-tra", "--rows", "none.txt"), "there is no file none.txt"),
            (("evaluate", "flipflop-tra", "--windows", "8"), "are for language models; this run learnt flipflop"),
            (("report", "none"), "has no config.json"),
            (("demo", "--out", "."), "tra is not a run folder, so it is not overwritten"),
            (("train", "--prest", "demo"), "Unrecognized options: --prest: did you mean --preset?"),
            (("bench", "ops"), "invalid choice 'ops'"),
            (("evaluate",), "Missing from tra evaluate"),
            (("evaluate", "flipflop-tra", "--rows", "exists", "--diagnose"), "either --rows or --diagnose"),
            (("suite", "run", "rivls"), "unknown suite 'rivls': did you mean 'rivals'"),
            (("suite", "run", "rivals", "--only", "rop"), "unknown part or mechanism 'rop': did you mean 'rope'"),
            (("suite", "run", "rivals", "--jobs", "0"), "jobs must be at least 1"),
        ),
    ],
)
def test_bad_input_gets_one_clear_line_and_status_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    for folder in ("exists", "tra"):
        (tmp_path / folder).mkdir()
    (tmp_path / "exists" / "config.json").write_text(json.dumps(preset("demo").to_dict()))
    (tmp_path / "tra" / "thesis.tex").write_text("…")
    (tmp_path / "newer.json").write_text(json.dumps(preset("demo").to_dict() | {"version": 99}))
    done = tra(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "tra" / "thesis.tex").exists()


def test_version() -> None:
    shown = tra("--version")
    assert shown.returncode == 0
    assert shown.stdout.strip() == tra_package.__version__


@pytest.mark.slow
def test_interrupted_evaluation_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tra", "evaluate", "flipflop-tra", "--examples", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("iid: 1.0000 of 2")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip() == "tra: interrupted"


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90", "90s", "9m", "1h30m", "2h", "1m5s")] == [
        90,
        90,
        540,
        5400,
        7200,
        65,
    ]
    for text in ("", "m", "9 m", "-5", "1.5h"):
        with pytest.raises(ValueError, match="a duration reads"):
            parse_duration(text)


@pytest.mark.slow
def test_demo_makes_its_point(tmp_path: Path) -> None:
    """The whole demo: TRA is right at every length, also with a margin, RoPE only near the one it was trained on."""
    done = tra("demo", "--out", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    exact = {
        mechanism: {
            row["split"]: row["exact"]
            for row in map(json.loads, (tmp_path / "demo" / mechanism / "eval.jsonl").read_text().splitlines())
        }
        for mechanism in ("tra", "tra-margin-2", "rope")
    }
    assert list(exact["tra"]) == ["iid", "sparse", "dense", "4x", "16x"]
    assert min(exact["tra"].values()) > 0.99
    assert min(exact["tra-margin-2"].values()) > 0.99
    assert "tra, margin 2" in done.stdout
    assert exact["rope"]["iid"] > 0.99
    assert exact["rope"]["4x"] < 0.6
    assert exact["rope"]["16x"] < 0.05
    assert (tmp_path / "demo" / "exact-match.png").stat().st_size > 5000
    again = tra("demo", "--out", "demo", "--seed", "x", cwd=tmp_path)
    assert again.returncode == 2
