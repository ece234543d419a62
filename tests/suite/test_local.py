"""A grid of runs on one machine: side by side, gone on with after a kill, and never overwritten."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tra.attention import MECHANISMS
from tra.config import differences
from tra.presets import preset
from tra.rows import read_rows
from tra.run import RunFolder, write_rows
from tra.suite import SUITES, Cell, suite
from tra.suite.cell import is_done, run_cell
from tra.suite.local import run_suite

SMALL = ("model.d_model=16", "task.arguments.length=16", "evaluate.examples=4", "evaluate.examples_of={}")


def cell(mechanism: str, steps: int = 4, seed: int = 0) -> Cell:
    changes = [
        *SMALL,
        f"model.mechanism={mechanism}",
        f"train.steps={steps}",
        f"train.seed={seed}",
        "train.log_every=2",
    ]
    return Cell(f"{mechanism}-{seed}", preset("demo").override(changes))


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_names_its_cells_once(name: str) -> None:
    cells = suite(name)
    assert len({cell.name for cell in cells}) == len(cells)
    everyone = {"language-rates": {"tra", "rope", "forgetting", "cope"}}.get(name, set(MECHANISMS))
    assert {cell.config.model.mechanism for cell in cells} == everyone
    assert all(cell.config == cell.config.resolved() for cell in cells)


def test_the_seeds_that_chose_the_rates_are_not_those_of_the_table() -> None:
    seeds = [{cell.config.train.seed for cell in suite(name)} for name in ("rivals", "rivals-rates")]
    assert not seeds[0] & seeds[1]


def test_language_rates_differ_in_nothing_but_what_they_compare() -> None:
    configs = [cell.config.to_dict() for cell in suite("language-rates")]
    compared = {"model.mechanism", "model.qk_norm", "model.block", "model.gate_bias", "optim.lr"}
    for one, other in itertools.combinations(configs, 2):
        assert set() < set(differences(one, other)) <= compared


def test_unknown_suite() -> None:
    with pytest.raises(ValueError, match="did you mean 'rivals'"):
        suite("rivls")


@pytest.mark.slow
def test_cells_end_evaluated_and_diagnosed_and_are_not_run_twice(tmp_path: Path) -> None:
    cells = [cell("tra"), cell("lstm")]
    assert [report.status for report in run_suite(cells, tmp_path, jobs=2, device="cpu")] == ["done", "done"]
    assert all(is_done(tmp_path / c.name) for c in cells)
    assert len(read_rows(tmp_path / "tra-0" / "diagnose.jsonl")) == 5
    assert len(read_rows(tmp_path / "lstm-0" / "eval.jsonl")) == 5
    assert [report.status for report in run_suite(cells, tmp_path, jobs=2, device="cpu")] == ["skipped", "skipped"]
    with pytest.raises(ValueError, match=r"another config; it differs in train\.steps"):
        run_suite([cell("tra", steps=5)], tmp_path, device="cpu")


@pytest.mark.slow
def test_a_failed_cell_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    broken = cell("rope")
    good = cell("nope")
    (tmp_path / broken.name / "checkpoints").mkdir(parents=True)
    (tmp_path / broken.name / "metrics.jsonl").mkdir()
    reports = {report.name: report for report in run_suite([broken, good], tmp_path, device="cpu")}
    assert reports[good.name].status == "done"
    assert reports[broken.name].status == "failed"
    assert "metrics.jsonl" in reports[broken.name].last_line


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_stop_it_stops_its_cells_which_save(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "from pathlib import Path; from tests.suite.test_local import cell; from tra.suite.local import run_suite; "
        f"run_suite([cell('rope', steps=3000)], Path({str(tmp_path)!r}), device='cpu')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    metrics = tmp_path / "rope-0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while len(read_rows(metrics)) < 20:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert process.wait(timeout=60) != 0
    assert not is_done(tmp_path / "rope-0")
    steps = len(read_rows(metrics))
    assert list((tmp_path / "rope-0" / "checkpoints").iterdir())  # told to stop, the cell had time to save
    assert steps < 1500
    with (tmp_path / "rope-0" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody is left who works on it
        assert run_cell(tmp_path / "rope-0", "cpu") == 1  # and who comes while another does, leaves


def test_a_cell_of_text_ends_with_its_perplexities(tmp_path: Path) -> None:
    changes = [
        "model.d_model=16",
        "model.n_layers=1",
        "train.steps=2",
        "train.batch_size=2",
        "evaluate.windows=[64,128]",
    ]
    run = RunFolder(tmp_path / "cell")
    run.start(preset("text-demo").override(changes), resume=False, overwrite=False)
    assert not is_done(run.path)
    assert run_cell(run.path, "cpu") == 0
    assert [(row["text"], row["window"]) for row in read_rows(run.perplexity_file)] == [
        ("alice-valid", 64),
        ("alice-valid", 128),
    ]
    assert is_done(run.path)
    write_rows(run.perplexity_file, read_rows(run.perplexity_file)[1:])
    assert not is_done(run.path)  # cut off between two windows


def test_bad_jobs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="jobs must be at least 1"):
        run_suite([], tmp_path, jobs=0)
