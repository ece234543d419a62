"""`tra suite` as people run it: with a budget, killed, gone on with, tabled, packed and merged."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slow import slow
from tests.suite.test_local import cell
from tra.cli.main import parse
from tra.runs import RunFolder
from tra.suite import cells
from tra.suite.archive import merge, pack, run_folders
from tra.suite.local import run_suite
from tra.suite.state import is_done

CHOSEN = ("flipflop", "language", "tra", "rope")
QUICK = ("paper-quick", "--only", *CHOSEN, "--device", "cpu")


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tra", "suite", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def finish(*arguments: str) -> str:
    with start(*arguments) as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


def table_of(out: Path) -> list[dict[str, object]]:
    return json.loads(finish("table", *QUICK, "--out", str(out), "--format", "json"))


@pytest.mark.slow
def test_killed_twice_it_ends_with_the_table_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Killed without warning at some moment, twice, and then left alone."""
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    said = finish("run", *QUICK, "--out", str(whole), "--jobs", "2", "--budget", "20m")
    assert "8 of 8 runs" in said
    chance = random.Random(0)
    for _ in range(2):
        with start("run", *QUICK, "--out", str(hurt), "--jobs", "2", "--budget", "20m") as process:
            deadline = time.monotonic() + 120
            before = len(list(hurt.glob("*/metrics.jsonl")))
            while len(list(hurt.glob("*/metrics.jsonl"))) <= before:  # something new has begun
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(chance.uniform(0, 3))
            process.kill()
    assert len([folder for folder in run_folders(hurt) if not is_done(folder)]) > 0
    finish("run", *QUICK, "--out", str(hurt), "--jobs", "2", "--budget", "20m")
    expected = table_of(whole)
    assert len(expected) == 2 * (5 + 2)
    assert table_of(hurt) == expected


@pytest.mark.timing
def test_a_budget_is_kept_and_what_is_left_goes_on(tmp_path: Path) -> None:
    """A run that would take far longer ends in time, saved, with status 0; and the next call goes on from there."""
    endless = cell("rope", steps=10**6)
    begun = time.monotonic()
    (report,) = run_suite([endless], tmp_path, device="cpu", budget=26)
    assert time.monotonic() - begun < 27
    assert report.status == "cut off"
    checkpoints = sorted((tmp_path / endless.folder / "checkpoints").iterdir())
    assert checkpoints
    (report,) = run_suite([endless], tmp_path, device="cpu", budget=26)
    assert sorted((tmp_path / endless.folder / "checkpoints").iterdir())[-1].name > checkpoints[-1].name


def test_a_budget_too_short_for_anything(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a budget of 5s is too short for anything: it takes 25s at least"):
        parse(["suite", "run", "paper-quick", "--out", str(tmp_path), "--budget", "5s", "--device", "cpu"])()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("done")
    reports = run_suite([cell("tra"), cell("nope")], out, jobs=2, device="cpu")
    assert {report.status for report in reports} == {"done"}
    return out


@pytest.mark.slow
def test_what_is_packed_can_be_merged(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Small weights travel too, so that a merged run is done."""
    assert pack(done, tmp_path / "a.tar.gz") == 2
    names = [cell("nope").folder, cell("tra").folder]
    assert merge([tmp_path / "a.tar.gz"], tmp_path / "out") == (names, [], [], [])
    assert all(is_done(folder) for folder in run_folders(tmp_path / "out"))
    assert merge([tmp_path / "a.tar.gz", done], tmp_path / "out") == ([], names, [], [])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert parse(["suite", "merge", str(done), "--out", str(tmp_path / "out")])() == 0
    assert "0 runs taken" in capsys.readouterr().out


@pytest.mark.slow
def test_conflicts_are_told_and_nothing_is_overwritten(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merge([done], tmp_path / "out")
    file = tmp_path / "out" / cell("tra").folder / "eval.jsonl"
    other = file.read_text().replace('"exact": ', '"exact": 9')
    file.write_text(other)
    assert parse(["suite", "merge", str(done), "--out", str(tmp_path / "out")])() == 1
    assert f"conflict: {cell('tra').folder}: {done} has other results than" in capsys.readouterr().err
    assert file.read_text() == other


@pytest.mark.slow
def test_the_furthest_is_taken_and_other_code_is_warned_of(done: Path, tmp_path: Path) -> None:
    half = tmp_path / "half" / cell("tra").folder
    half.mkdir(parents=True)
    for name in ("config.json", "environment.json"):
        (half / name).write_text((done / half.name / name).read_text())
    environment = done / cell("nope").folder / "environment.json"
    before = environment.read_text()
    sessions = json.loads(before)
    sessions["sessions"][0]["commit"] = "another"
    try:
        environment.write_text(json.dumps(sessions))
        merged = merge([tmp_path / "half", done], tmp_path / "out")
    finally:
        environment.write_text(before)
    assert is_done(tmp_path / "out" / half.name)
    assert not merged.conflicts
    assert "different versions of the code: " in merged.warnings[0]
    assert "another (1)" in merged.warnings[0]


def test_merge_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_text("not one")
    for names, message in (
        ([str(tmp_path / "none")], "there is no folder or archive"),
        ([str(tmp_path / "a.tar.gz")], "is no archive of runs"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(["suite", "merge", *names, "--out", str(tmp_path / "out")])()
    with pytest.raises(ValueError, match="and --out where they go together"):
        parse(["suite", "merge", "a"])()


def test_a_table_in_miniature_says_what_it_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["suite", "table", "paper-quick", "--only", *CHOSEN, "--out", str(tmp_path)])() == 0
    assert "## flipflop\n\n60 steps of a tiny model: this shows the form of the table" in capsys.readouterr().out


def test_status_before_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["suite", "status", "paper-quick", "--only", *CHOSEN, "--out", str(tmp_path)])() == 0
    assert capsys.readouterr().out.strip().endswith("8 waiting")
    assert len(cells("paper-quick", CHOSEN)) == 8


@pytest.mark.parametrize(
    "damage", [b"[" * 100_000, *slow(b'{"', b"9" * 5000, b"[3]", b"null", b"\xff", b'{"step": ' + b"9" * 400)]
)
def test_a_damaged_file_of_a_cell_is_one_line_that_names_it(tmp_path: Path, damage: bytes) -> None:
    (one,) = cells("paper-quick", ("flipflop", "tra"))[:1]
    out = ["--only", "flipflop", "tra", "--out", str(tmp_path)]
    for name, actions in (
        ("config.json", ("status", "table")),
        ("metrics.jsonl", ("status",)),
        ("eval.jsonl", ("status", "table")),
        ("diagnose.jsonl", ("status", "table")),
        ("failed.json", ("status",)),
    ):
        run = RunFolder(tmp_path / one.folder)
        run.start(one.config, resume=False, overwrite=False)
        run.weights_file.write_bytes(b"some")  # so that results are looked at
        (run.path / name).write_bytes(damage + b"\n")
        for action in actions:
            with pytest.raises(ValueError, match=rf"{name}\b.* (is damaged|is not JSON|must hold)") as caught:
                parse(["suite", action, "paper-quick", *out])()
            assert "\n" not in str(caught.value)
        shutil.rmtree(run.path)


@pytest.mark.slow
def test_told_to_stop_it_is_not_called_failed(tmp_path: Path) -> None:
    with start("run", *QUICK, "--out", str(tmp_path), "--jobs", "2") as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/metrics.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 143
    assert not list(tmp_path.glob("*/failed.json"))
