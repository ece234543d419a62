"""A grid of runs on one machine: side by side, gone on with after a kill, and never overwritten."""

from __future__ import annotations

import collections
import dataclasses
import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tra.attention import MECHANISMS
from tra.config import RunConfig, differences
from tra.model import Decoder
from tra.presets import preset
from tra.runs import RunFolder, read_rows, write_rows
from tra.suite import SUITES, Cell, Part, cells, suite
from tra.suite.cell import run_cell
from tra.suite.cell_process import CUT_OFF, Reports, prepare_cells, start_cell
from tra.suite.grid import cells_of
from tra.suite.local import run_suite
from tra.suite.state import is_done, state

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


def processes_of(folder: str) -> list[int]:
    """Return the processes that work on a cell."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and folder.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_names_its_cells_once(name: str) -> None:
    found = cells(name)
    assert len({cell.name for cell in found}) == len({cell.folder for cell in found}) == len(found)
    named = {"tra", "rope", "forgetting", "cope"}
    some = {"paper-rates": named, "language-rates": named, "lengths": {"tra", "rope"}, "margin-rates": {"tra"}}
    some["trainability"] = {"tra", "rope", "forgetting"}
    everyone = some.get(name, some.get(name.removesuffix("-rates"), set(MECHANISMS)))
    assert {cell.config.model.mechanism for cell in found} == everyone
    assert all(cell.config == cell.config.resolved() for cell in found)


def test_the_papers_tables() -> None:
    """Every mechanism with four seeds, but for the cost, which is RoPE's and TRA's."""
    for name, seeds in (("paper", 4), ("paper-quick", 2)):
        tables = suite(name)
        assert list(tables) == ["flipflop", "copy-induct", "instruct", "language", "cost"]
        for part in list(tables.values())[:4]:
            per_row = collections.Counter((cell.row, cell.config.model.mechanism) for cell in part.cells)
            assert set(per_row.values()) == {seeds}
            assert len({mechanism for _, mechanism in per_row}) == len(MECHANISMS)
        assert [cell.config.model.mechanism for cell in tables["cost"].cells] == ["rope", "tra", "rope", "tra"]


def test_a_digest_is_that_of_what_is_said() -> None:
    """Names and defaults don't change it, everything else does."""
    one = cell("tra")
    assert one._replace(name="other").digest == one.digest
    said = one.config.to_dict()
    del said["train"]["accumulate"], said["model"]["cope_positions"]
    assert one._replace(config=RunConfig.from_dict(said)).digest == one.digest
    for change in ("train.seed=9", "model.d_model=18", "task.arguments.length=18", 'evaluate.splits=["iid"]'):
        assert one._replace(config=one.config.override([change])).digest != one.digest


def test_digests_of_former_versions_are_found_again() -> None:
    """Finished cells lie in folders that have these names, from before there was a threshold or a margin."""
    assert Cell("", preset("demo")).digest == "abcfa41d"
    assert Cell("", preset("flipflop-quick").override(["train.seed=3", "model.gate_bias=3"])).digest == "a4f09051"
    margins = [preset("demo").override([f"model.margin={margin}"]) for margin in (0, 2, 4, "inf")]
    assert len({Cell("", config).digest for config in margins}) == 4
    assert Cell("", margins[0]).digest == "abcfa41d"


def test_a_name_stands_for_one_config() -> None:
    twice = {"a": Part([cell("tra")]), "b": Part([cell("tra")])}
    assert len(cells_of(twice)) == 1
    with pytest.raises(ValueError, match=r"two cells are called tra-0, but their configs differ in train\.steps"):
        cells_of({"a": Part([cell("tra"), cell("tra", steps=5)])})


def test_parts_and_mechanisms_can_be_chosen() -> None:
    tables = {"a": Part([cell("tra"), cell("rope")]), "b": Part([cell("tra", seed=1)])}
    assert [c.name for c in cells_of(tables, ["a"])] == ["tra-0", "rope-0"]
    assert [c.name for c in cells_of(tables, ["tra"])] == ["tra-0", "tra-1"]
    assert [c.name for c in cells_of(tables, ["a", "tra"])] == ["tra-0"]
    with pytest.raises(ValueError, match="unknown part or mechanism 'rop': did you mean 'rope'"):
        cells_of(tables, ["rop"])


def test_a_suite_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.suite.test_local import cell\nfrom tra.suite import Part\n"
        "def two():\n    return {'t': Part([cell('tra'), cell('rope')])}\ndef wrong():\n    return [1]\n"
    )
    assert [c.name for c in cells(f"{file}:two")] == ["tra-0", "rope-0"]
    for name, message in (
        (f"{file}:three", "has no function three"),
        (f"{file}:wrong", "must return a dict of Parts, got list"),
        (f"{tmp_path}/none.py:two", "there is no file"),
    ):
        with pytest.raises(ValueError, match=message):
            suite(name)


def test_the_seeds_that_chose_the_rates_are_not_those_of_the_table() -> None:
    seeds = [{cell.config.train.seed for cell in cells(name)} for name in ("rivals", "rivals-rates")]
    assert not seeds[0] & seeds[1]


def test_language_rates_differ_in_nothing_but_what_they_compare() -> None:
    configs = [cell.config.to_dict() for cell in cells("language-rates")]
    compared = {"model.mechanism", "model.qk_norm", "model.block", "model.gate_bias", "optim.lr"}
    for one, other in itertools.combinations(configs, 2):
        assert set() < set(differences(one, other)) <= compared


def test_unknown_suite() -> None:
    with pytest.raises(ValueError, match="did you mean 'rivals'"):
        suite("rivls")


@pytest.mark.slow
def test_cells_end_evaluated_and_diagnosed_and_are_not_run_twice(tmp_path: Path) -> None:
    two = [cell("tra"), cell("lstm")]
    assert [report.status for report in run_suite(two, tmp_path, jobs=2, device="cpu")] == ["done", "done"]
    assert all(is_done(tmp_path / c.folder) for c in two)
    assert len(read_rows(tmp_path / two[0].folder / "diagnose.jsonl")) == 5
    assert len(read_rows(tmp_path / two[1].folder / "eval.jsonl")) == 5
    assert [report.status for report in run_suite(two, tmp_path, jobs=2, device="cpu")] == ["skipped", "skipped"]
    longer = cell("tra", steps=5)  # the same name, and another cell
    assert [report.status for report in run_suite([longer], tmp_path, device="cpu")] == ["done"]
    assert is_done(tmp_path / two[0].folder)
    assert is_done(tmp_path / longer.folder)


def test_a_cell_with_damaged_weights_is_not_done(tmp_path: Path) -> None:
    config = cell("lstm", steps=2).config
    config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, splits=("iid",)))
    run = RunFolder(tmp_path / "cell")
    run.start(config, resume=False, overwrite=False)
    row = {"shortest": 16, "longest": 16, "examples": 4, "exact": 1.0, "low": 0.4, "high": 1.0}
    write_rows(run.evaluation_file, [{"split": split, **row} for split in config.evaluate.splits])
    run.save_weights(Decoder(config.model), 2)
    assert (is_done(run.path), state(run.path).status) == (True, "done")
    content = bytearray(run.weights_file.read_bytes())
    content[-5] ^= 1
    run.weights_file.write_bytes(content)
    assert (is_done(run.path), state(run.path).status) == (False, "cut off")
    run.save_weights(Decoder(dataclasses.replace(config.model, d_model=32)), 2)  # intact, and of another model
    assert not is_done(run.path)


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "cell").mkdir()
    (tmp_path / "cell" / "log.txt").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        start_cell(tmp_path / "cell", "cpu", {})
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.slow
def test_a_failed_cell_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    broken = cell("rope")
    good = cell("nope")
    (tmp_path / broken.folder / "checkpoints").mkdir(parents=True)
    (tmp_path / broken.folder / "metrics.jsonl").mkdir()
    reports = {report.name: report for report in run_suite([broken, good], tmp_path, device="cpu")}
    assert reports[good.name].status == "done"
    assert reports[broken.name].status == "failed"
    assert "metrics.jsonl" in reports[broken.name].last_lines
    (tmp_path / broken.folder / "metrics.jsonl").rmdir()
    (again,) = run_suite([broken], tmp_path, device="cpu")  # it isn't tried again by itself
    assert (again.status, again.last_lines) == ("failed", reports[broken.name].last_lines)
    assert state(tmp_path / broken.folder).status == "failed"
    (retried,) = run_suite([broken], tmp_path, device="cpu", retry=True)
    assert retried.status == "done"
    assert state(tmp_path / broken.folder).status == "done"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_told_to_stop_it_stops_its_cells_which_save(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from pathlib import Path; from tests.suite.test_local import cell; from tra.suite.local import run_suite; "
        f"run_suite([cell('rope', steps=3000)], Path({str(tmp_path)!r}), device='cpu')"
    )
    folder = cell("rope", steps=3000).folder
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    metrics = tmp_path / folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while len(read_rows(metrics)) < 20:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert process.wait(timeout=60) != 0
    assert not is_done(tmp_path / folder)
    assert len(read_rows(metrics)) < 1500
    with (tmp_path / folder / "lock").open() as lock:
        while True:  # killed, the suite can't wait for its cell, which ends by itself
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            assert number == signal.SIGKILL
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert list((tmp_path / folder / "checkpoints").iterdir())  # told to stop, the cell had time to save
        monkeypatch.setattr("tra.suite.cell.LOCK_SECONDS", 0.2)
        assert run_cell(tmp_path / folder, "cpu") == CUT_OFF  # and who comes while another does, leaves


@pytest.mark.slow
def test_a_cell_ends_though_its_suite_ended_before_it_could_look(tmp_path: Path) -> None:
    """Where starting takes long, the suite may be gone before the cell has imported PyTorch."""
    long = cell("rope", steps=100_000)
    prepare_cells([long], tmp_path, False, Reports(lambda _: None))
    code = (
        "import os; from pathlib import Path; from tra.suite.cell_process import start_cell; "
        f"start_cell(Path({str(tmp_path / long.folder)!r}), 'cpu', dict(os.environ)); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 120
    try:
        while processes_of(long.folder):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        for process in processes_of(long.folder):
            os.kill(process, signal.SIGKILL)
    assert not is_done(tmp_path / long.folder)


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
