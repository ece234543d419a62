"""`tra calibrate`: windows are measured, written and shown, and bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import CallTra, Command, output_or_error
from tra.presets import preset
from tra.runs import RunFolder, read_windows
from tra.text import load_tokenizer
from tra.text.prepare import prepare
from tra.training import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained, but for two steps: text, flip-flop, and RoPE on text; and a store of bytes."""
    folder = tmp_path_factory.mktemp("runs")
    small = ("model.d_model=32", "model.n_layers=1", "train.batch_size=4", "train.steps=2")
    for name, source, changes in (
        ("text-demo", "text-demo", ()),
        ("demo", "demo", ("task.arguments.length=16",)),
        ("rope", "text-demo", ("model.mechanism=rope",)),
    ):
        train(preset(source).override([*small, *changes]), folder / name, device=torch.device("cpu"))
    (folder / "held-out.txt").write_text("How doth the little crocodile improve his shining tail. " * 40)
    prepare([str(folder / "held-out.txt")], folder / "store", tokenizer=load_tokenizer("bytes"))
    return folder


@pytest.fixture
def command(call_tra: CallTra, monkeypatch: pytest.MonkeyPatch, runs: Path) -> Command:
    monkeypatch.chdir(runs)
    return lambda *arguments, **options: output_or_error(*call_tra("calibrate", *arguments, **options))


def test_a_language_model(command: Command, runs: Path) -> None:
    status, said = command("text-demo", "store", "--length", 128, "--sequences", 3, "--tolerance", 0.01)
    assert status == 0, said
    assert "smallest windows, tolerance 0.01" in said
    assert "measured at 192 queries of 3 sequences of 128 tokens (store, running text)" in said
    assert said.splitlines()[-1] == "text-demo/windows.json"
    run = RunFolder(runs / "text-demo")
    found = read_windows(run.windows_file, run)
    assert (found.text, found.tolerance, found.statistic) == ("store", 0.01, "tail")
    for _ in range(2):  # the second time over the first
        status, said = command("text-demo", "--statistic", "mean", "--length", 64, "--out", "new/some.json", "--json")
        assert status == 0
    assert json.loads(said)["windows"] == json.loads(said)["mean_windows"]
    assert read_windows(runs / "new/some.json", run).text == "alice-valid"


def test_what_no_window_is_enough_for_is_said(command: Command) -> None:
    status, said = command("text-demo", "--length", 16, "--tolerance", 1e-7)
    assert status == 0
    assert "no window up to 8 is enough for heads (layer.head) 0.0, 0.1, which got 16 without a known error" in said


def test_a_task(command: Command, runs: Path) -> None:
    status, said = command("demo", "--split", "sparse", "--sequences", 2)
    assert status == 0, said
    assert "measured at 16 queries of 2 sequences of 16 tokens (flipflop, sparse)" in said
    assert (runs / "demo/windows.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none",), "none doesn't exist; runs that ship"),
        (("text-demo", "--tolerance", 0), "tolerance must lie above 0 and below 1, got 0.0"),
        (("text-demo", "--tolerance", -1), "tolerance must lie above 0 and below 1, got -1.0"),
        (("text-demo", "--tolerance", "nan"), "tolerance must lie above 0 and below 1, got nan"),
        (("text-demo", "nowhere"), "there is no token store nowhere; tra prepare makes one"),
        (("text-demo", "gpt2"), "gpt2 has the tokenizer 'gpt2', the run 'bytes'"),
        (("text-demo", "--length", 10**6), "a calibration needs at least 2 sequences of 1,000,000 tokens"),
        (("text-demo", "--sequences", 1), "at least 2 sequences of at least 8 tokens, got 1"),
        (("text-demo", "--split", "iid"), "--split is for tasks; this run learnt text"),
        (("demo", "--length", 8), "STORE and --length are for language models; this run learnt flipflop"),
        (("demo", "--split", "spars"), "unknown split of flipflop 'spars': did you mean 'sparse'"),
        (("demo", "--out", "held-out.txt"), "windows are written to a .json file, got held-out.txt"),
        (("demo", "--out", "demo/config.json"), "demo/config.json exists, and is not a calibration"),
        (("demo", "--out", "demo"), "demo is a folder: name a .json file to write to"),
        (("rope",), "rope has no windows to calibrate: they are measured for TRA"),
        (("text-demo", "--statistic", "median"), "invalid choice 'median'"),
    ],
)
def test_bad_input_is_one_line(command: Command, runs: Path, arguments: tuple[object, ...], message: str) -> None:
    if "gpt2" in arguments and not (runs / "gpt2").exists():
        _store_of_another_tokenizer(runs / "store", runs / "gpt2")
    status, said = command(*arguments)
    assert status == 2
    assert message in said
    assert len(said.splitlines()) == 1


def test_only_the_run_s_own_damaged_windows_are_measured_anew(command: Command, runs: Path) -> None:
    damaged = runs / "demo/windows.json"
    damaged.write_text("{")
    assert command("demo", "--sequences", 2)[0] == 0
    assert read_windows(damaged, RunFolder(runs / "demo")).text == "flipflop"
    (runs / "elsewhere").mkdir()
    (runs / "elsewhere/windows.json").write_text('{"panes": 4}')
    status, said = command("demo", "--out", "elsewhere/windows.json")
    assert (status, said.strip()) == (
        2, "tra: elsewhere/windows.json exists, and is not a calibration: it is not overwritten"
    )  # fmt: skip
    assert (runs / "elsewhere/windows.json").read_text() == '{"panes": 4}'


def _store_of_another_tokenizer(store: Path, other: Path) -> None:
    """Copy a store, and let its manifest name GPT-2's tokenizer, whose files tests may not have."""
    other.mkdir()
    for file in store.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"] |= {"name": "gpt2", "vocab_size": 50_257}
    (other / "manifest.json").write_text(json.dumps(manifest))
