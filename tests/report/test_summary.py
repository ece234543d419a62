"""The report reads run folders, and what is committed is what it writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tra.attention import MECHANISMS
from tra.config import RunConfig
from tra.report.comparison import comparison_text, write_comparison
from tra.report.markdown import read_notes
from tra.report.runs import read_run, read_runs
from tra.report.summary import summary_text, write_summary
from tra.suite import cells

RESULTS = Path(__file__).parents[2] / "results"
FLIPFLOP = RESULTS / "flipflop"


@pytest.mark.parametrize(
    ("folder", "names"), [("demo", ("tra", "tra, margin 2", "rope", "forgetting")), ("flipflop", ("tra", "rope"))]
)
def test_committed_results_are_current(folder: str, names: tuple[str, ...]) -> None:
    runs = {name: read_run(RESULTS / folder / name.replace(", ", "-").replace(" ", "-")) for name in names}
    assert (RESULTS / folder / "README.md").read_text() == summary_text(runs, read_notes(RESULTS / folder))


def test_the_committed_comparison_is_current() -> None:
    folder = RESULTS / "rivals"
    runs = read_runs([path for path in folder.iterdir() if path.is_dir()])
    assert {run.seed for run in runs} == {0, 1, 2}
    assert len(runs) == 3 * len(MECHANISMS)
    assert all(
        RunConfig.from_dict(run.config) == cell.config
        for cell in cells("rivals")
        for run in [read_run(folder / cell.name)]
    )
    assert (folder / "README.md").read_text() == comparison_text(runs, (folder / "notes.md").read_text())


def test_a_comparison_has_means_and_ranges(tmp_path: Path) -> None:
    rows = {
        (path.name, row["split"]): row["exact"]
        for path in (RESULTS / "rivals").glob("rope-*")
        for row in map(json.loads, (path / "eval.jsonl").read_text().splitlines())
    }
    values = [rows[f"rope-{seed}", "4x"] for seed in (0, 1, 2)]
    readme, *_ = write_comparison(read_runs(sorted((RESULTS / "rivals").glob("rope-*"))), tmp_path)
    assert f"{sum(values) / 3:.3f} ({min(values):.3f}-{max(values):.3f})" in readme.read_text()


def test_results_stay_small() -> None:
    assert sum(file.stat().st_size for file in RESULTS.rglob("*") if file.is_file()) < 10e6


def test_a_table_says_what_the_rows_say(tmp_path: Path) -> None:
    paths = write_summary(read_runs([FLIPFLOP / "tra", FLIPFLOP / "rope"]), tmp_path / "out")
    names = ["README.md", "exact-match.png", "exact-by-length.png", "training.png"]
    assert [path.name for path in paths] == names
    assert all(f"]({name})" in paths[0].read_text() for name in names[1:])
    assert all(path.stat().st_size > 500 for path in paths)
    assert "| sparse | 512 | 160,000 | 1.00000 (0.99998-1.00000) | 0.70158 (0.69933-0.70382) |" in paths[0].read_text()


def test_runs_that_cannot_be_reported(tmp_path: Path) -> None:
    broken, other = tmp_path / "broken", tmp_path / "other"
    shutil.copytree(FLIPFLOP / "rope", broken)
    shutil.copytree(FLIPFLOP / "rope", other)
    (broken / "eval.jsonl").unlink()
    damaged, unnamed = tmp_path / "damaged", tmp_path / "unnamed"
    shutil.copytree(FLIPFLOP / "rope", damaged)
    shutil.copytree(FLIPFLOP / "rope", unnamed)
    (damaged / "eval.jsonl").write_text((damaged / "eval.jsonl").read_text() + "{\n")
    (unnamed / "environment.json").unlink()
    config = json.loads((other / "config.json").read_text())
    config["task"]["arguments"] = {"length": 64}
    (other / "config.json").write_text(json.dumps(config))
    for folders, message in (
        ([], "at least one"),
        ([broken], "has no eval.jsonl"),
        ([FLIPFLOP / "tra", FLIPFLOP / "tra"], "two runs of tra"),
        ([FLIPFLOP / "tra", other], "different tasks"),
        ([damaged], "1 of . lines of eval.jsonl are damaged"),
        ([unnamed], "has no environment.json"),
        ([tmp_path / "missing"], "doesn't exist"),
    ):
        with pytest.raises(ValueError, match=message):
            read_runs(folders)
