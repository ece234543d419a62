"""Tables of what is there: means, spread, the best and the worst, in three forms."""

from __future__ import annotations

import csv
import io
import json
import math
import tarfile
from pathlib import Path

import pytest
from rich.console import Console

from tests.suite.test_local import cell
from tra.cli.suite_view import SuiteView
from tra.runs import RunFolder, write_rows
from tra.suite.cell_process import Report
from tra.suite.grid import Part, Suite
from tra.suite.suites import RATES, SEARCHED_RATES
from tra.suite.table import as_csv, as_json, as_markdown, best_rates, final_loss, table


def written(out: Path) -> dict[str, Part]:
    """TRA with two seeds, RoPE with one of two."""
    cells = [cell("tra"), cell("tra", seed=1), cell("rope"), cell("rope", seed=1)]
    for number, each in enumerate(cells[:3]):
        run = RunFolder(out / each.folder)
        run.start(each.config, resume=True, overwrite=False)
        write_rows(run.evaluation_file, [{"split": "iid", "exact": (1.0, 0.5, 0.25)[number]}])
        rows = [
            {"step": step, "loss": 1.0, "tokens_per_second": speed} for step, speed in ((1, 1), (2, 512), (4, 1024))
        ]
        write_rows(run.metrics_file, rows)
    return {"flip": Part(cells)}


def exists(folder: Path) -> bool:
    return folder.exists()


def test_entries(tmp_path: Path) -> None:
    tra, rope = table(written(tmp_path), tmp_path, exists)
    assert (tra.row, tra.column, tra.mean, tra.seeds, tra.best, tra.worst) == ("tra", "iid", 0.75, 2, 1.0, 0.5)
    assert tra.deviation == pytest.approx(math.sqrt(0.125))
    assert (rope.mean, rope.deviation, rope.seeds) == (0.25, None, 1)


def test_forms(tmp_path: Path) -> None:
    suite = written(tmp_path)
    entries = table(suite, tmp_path, exists)
    text = as_markdown(entries, suite)
    assert "| tra | 2 of 2 | 0.75 ± 0.35 (worst 0.5) |" in text
    assert "| rope | 1 of 2 | 0.25 |" in text
    assert [row["mean"] for row in csv.DictReader(io.StringIO(as_csv(entries)))] == ["0.75", "0.25"]
    assert [row["worst"] for row in json.loads(as_json(entries))] == [0.5, 0.25]


def test_margins_are_rows_of_their_own(tmp_path: Path) -> None:
    one = cell("tra")
    changes = ([], ["model.margin=2"], ["model.margin=inf", "model.threshold=-1"])
    cells = [one._replace(config=one.config.override(change), name=f"tra-{n}") for n, change in enumerate(changes)]
    for number, each in enumerate(cells):
        run = RunFolder(tmp_path / each.folder)
        run.start(each.config, resume=True, overwrite=False)
        write_rows(run.evaluation_file, [{"split": "iid", "exact": (1.0, 0.5, 0.25)[number]}])
    suite = {"flip": Part(cells)}
    text = as_markdown(table(suite, tmp_path, exists), suite)
    for row in ("tra | 1 of 1 | 1", "tra, margin 2 | 1 of 1 | 0.5", "tra, threshold -1, margin inf | 1 of 1 | 0.25"):
        assert f"| {row} |" in text


def test_cost_is_a_step_and_a_ratio(tmp_path: Path) -> None:
    """Batches of 64 × 16 symbols, at a median of 768 tokens a second; the compiler's first line doesn't count."""
    cells = written(tmp_path)["flip"].cells
    suite = {"cost": Part([each._replace(row=f"tiny, {each.config.model.mechanism}") for each in cells[1:3]], "cost")}
    found = {(entry.row, entry.column): entry.mean for entry in table(suite, tmp_path, exists)}
    assert found["tiny, tra", "ms a step"] == pytest.approx(1e3 * 64 * 16 / 768)
    assert found["tiny, tra", "over RoPE's"] == 1.0


def test_solved_counts_seeds_by_rate(tmp_path: Path) -> None:
    """A run has solved its task at an exact match of 0.99 on the first split, whatever others say."""
    cells = []
    for rate, found in ((1e-2, [0.98, 0.99, 1.0]), (3e-4, [0.2])):
        for seed, exact in enumerate(found):
            one = cell("tra", seed=seed)
            one = one._replace(config=one.config.override([f"optim.lr={rate}"]), name=f"{rate}-{seed}")
            run = RunFolder(tmp_path / one.folder)
            run.start(one.config, resume=True, overwrite=False)
            write_rows(run.evaluation_file, [{"split": "iid", "exact": exact}, {"split": "4x", "exact": 0.0}])
            cells.append(one)
    suite = {"demo": Part(cells, "solved")}
    text = as_markdown(table(suite, tmp_path, exists), suite)
    assert "| | seeds | 0.0003 | 0.01 |" in text
    assert "| tra | 3 of 3 | 0 of 1 | 2 of 3 |" in text


def search(out: Path, losses: dict[tuple[str, float], list[float]]) -> Suite:
    """Write a run for each final loss, by mechanism and rate; seeds count up."""
    cells = []
    for (mechanism, rate), found in losses.items():
        for seed, loss in enumerate(found):
            one = cell(mechanism, seed=seed)
            one = one._replace(config=one.config.override([f"optim.lr={rate}"]), name=f"{mechanism}-{rate}-{seed}")
            run = RunFolder(out / one.folder)
            run.start(one.config, resume=True, overwrite=False)
            rows = [{"step": step, "loss": 9.0 if step < 18 else loss + step - 18.5} for step in range(20)]
            write_rows(run.metrics_file, rows)
            cells.append(one)
    return {"search": Part(cells, "rate")}


def test_a_search_names_the_best_rate_and_says_when_it_is_at_an_edge(tmp_path: Path) -> None:
    """The loss is the mean of the last tenth of the log, here of two lines, and the mean over seeds decides."""
    losses = {
        ("tra", 3e-3): [0.5, 0.9],
        ("tra", 3e-4): [0.6, 0.6],
        ("tra", 1e-3): [0.1, 1.2],
        ("rope", 3e-4): [0.3],
        ("rope", 1e-3): [0.2],
        ("rope", 3e-3): [0.4],
    }
    suite = search(tmp_path, losses)
    entries = table(suite, tmp_path, exists)
    assert best_rates(entries, "search") == {"tra": (3e-4, True), "rope": (1e-3, False)}
    text = as_markdown(entries, suite)
    assert "| | seeds | 0.0003 | 0.001 | 0.003 |" in text
    assert "| rope | 1 of 1 | 0.3 | 0.2 | 0.4 |" in text
    assert "Best rates: tra 0.0003, rope 0.001." in text
    assert "Best at an edge, so that a wider search may find better ones: tra." in text
    assert "at an edge" not in as_markdown([e for e in entries if e.row == "rope"], suite)


def test_rates_of_rivals_are_those_that_the_committed_search_found(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[2] / "results/rivals/rates.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    entries = []
    for file in tmp_path.rglob("metrics.jsonl"):
        config = json.loads((file.parent / "config.json").read_text())
        loss = final_loss(RunFolder(file.parent))
        entries.append((config["model"]["mechanism"], config["optim"]["lr"], loss))
    for mechanism, rate in RATES.items():
        sums = {x: sum(loss for name, lr, loss in entries if (name, lr) == (mechanism, x)) for x in SEARCHED_RATES}
        assert min(sums, key=sums.__getitem__) == rate, mechanism


def test_the_screen_shows_what_is_known(tmp_path: Path) -> None:
    suite = written(tmp_path)
    cells = suite["flip"].cells
    view = SuiteView(suite, cells, tmp_path, jobs=2, budget=600)
    for report in (
        Report("tra-0", "done", 10.0),
        Report("tra-1", "started"),
        Report("rope-0", "failed", 3.0, "out of [memory]"),
    ):
        view(report)
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(view.screen())
    text = console.export_text()
    for part in ("1 of 4 done, 1 running, 1 failed", "about 10s left", "budget 10m00s", "tra-1", "4 of 4", "1.0000"):
        assert part in text
    assert "rope-0 failed: out of [memory]" in text
    assert "flip" in text


def test_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = written(tmp_path)
    view = SuiteView(suite, suite["flip"].cells, tmp_path, jobs=1)
    view(Report("tra-0", "started"))
    view(Report("tra-0", "done", 12.0))
    view(Report("rope-0", "failed", 1.0, "one\ntwo"))
    assert capsys.readouterr().out.splitlines() == ["tra-0: done in 12s (1 of 4)", "rope-0: failed in 1s: two (1 of 4)"]
