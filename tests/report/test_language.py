"""Language models in tables and figures: their data, and whether what is committed is current."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.report.pages import make_text_run
from tra.config import RunConfig
from tra.report.curve_figures import perplexity_curves
from tra.report.curves import ratio_of
from tra.report.language import language_text, losses_by_position, write_language
from tra.report.page.data import page_data
from tra.report.runs import EvaluatedRun, read_run, read_runs
from tra.suite import cells

LANGUAGE = Path(__file__).parents[2] / "results" / "language"
FOLDERS = sorted(path.parent for path in LANGUAGE.glob("*/config.json"))


def row(window: int, loss: float, by_document: list[tuple[float, int]], **changes: Any) -> dict[str, Any]:
    return {
        "text": "t",
        "window": window,
        "overlap": "none",
        "loss": loss,
        "perplexity": math.exp(loss),
        "low": math.exp(loss) - 1,
        "high": math.exp(loss) + 1,
        "by_document": by_document,
        "by_position": [(1, 2.0, 3)],
    } | changes


def run(mechanism: str, seed: int, *rows: dict[str, Any]) -> EvaluatedRun:
    config = {"model": {"mechanism": mechanism}, "train": {"seed": seed}, "task": {"name": "text"}}
    return EvaluatedRun(config, [], [], [], [], list(rows))


def test_what_is_committed_is_current() -> None:
    runs = read_runs(FOLDERS)
    notes = (LANGUAGE / "notes.md").read_text()
    assert (LANGUAGE / "README.md").read_text() == language_text(runs, notes, LANGUAGE / "rates.tar.gz")


def test_committed_runs_are_of_one_kind() -> None:
    """Mechanism, rate and norm apart, they differ in nothing."""
    configs = [RunConfig.load(folder / "config.json") for folder in FOLDERS]
    same = [
        config.override(["model.mechanism=tra", "optim.lr=1.0", "model.qk_norm=null"]).to_dict() for config in configs
    ]
    assert all(config == same[0] for config in same)


def test_rates_are_those_of_the_search(tmp_path: Path) -> None:
    """Each cell of the search is in the archive with its config, and the runs have the best rate of their mechanism."""
    shutil.unpack_archive(LANGUAGE / "rates.tar.gz", tmp_path)
    best: dict[str, tuple[float, float, bool | None]] = {}
    for cell in cells("language-rates"):
        assert RunConfig.load(tmp_path / cell.name / "config.json") == cell.config
        (found,) = map(json.loads, (tmp_path / cell.name / "perplexity.jsonl").read_text().splitlines())
        model = cell.config.model
        if model.block == "authors" and model.gate_bias == 0:
            candidate = (found["perplexity"], cell.config.optim.lr, model.qk_norm)
            best[model.mechanism] = min(best.get(model.mechanism, candidate), candidate)
    for folder in FOLDERS:
        config = RunConfig.load(folder / "config.json")
        assert best[config.model.mechanism][1:] == (config.optim.lr, config.model.qk_norm)


def test_a_curve_has_means_and_a_band() -> None:
    runs = [
        run("rope", 0, row(128, 1.0, []), row(256, 3.0, [])),
        run("tra", 0, row(256, 2.0, []), row(128, 1.0, [])),
        run("tra", 1, row(128, 2.0, []), row(128, 9.0, [], overlap="half"), row(128, 9.0, [], text="other")),
    ]
    curves = perplexity_curves(runs, "t")
    assert list(curves) == ["tra", "rope"]  # the order of tables
    assert curves["tra"].x == [128, 256]
    assert curves["tra"].middle == pytest.approx([math.exp(1.5), math.exp(2)])
    assert (curves["tra"].low[0], curves["tra"].high[0]) == pytest.approx((math.e, math.exp(2)))  # two seeds
    assert (curves["tra"].low[1], curves["tra"].high[1]) == pytest.approx((math.exp(2) - 1, math.exp(2) + 1))  # one
    assert list(perplexity_curves(runs, "t", "half")) == ["tra"]


def test_ratios_are_paired() -> None:
    """Documents that differ a hundredfold in difficulty, on which one model is always 0.1 nats worse."""
    easy_and_hard = [(10.0 * n, 10) for n in range(1, 20)]
    worse = [(nats + 0.1 * tokens, tokens) for nats, tokens in easy_and_hard]
    found = ratio_of(run("rope", 0, row(128, 0.0, worse)), 128, run("tra", 0, row(128, 0.0, easy_and_hard)), 128, "t")
    assert found is not None
    assert found[:3] == pytest.approx((math.exp(0.1),) * 3)


def test_figures_and_page_are_written(tmp_path: Path) -> None:
    runs = [read_run(folder) for folder in FOLDERS]
    paths = write_language(runs, tmp_path)
    assert [path.name for path in paths] == ["README.md", "perplexity.png", "places.png", "training.png"]
    assert all(path.stat().st_size > 500 for path in paths)
    assert set(losses_by_position(runs, "wikitext-test")) == {run.mechanism for run in runs}


def test_settings_that_are_not_stored_have_their_defaults(tmp_path: Path) -> None:
    """As in a run of the preset text-demo, whose config names neither data nor window."""
    folder = make_text_run(tmp_path / "run", "tra", grows=0.1)
    config = json.loads((folder / "config.json").read_text())
    config["task"]["arguments"] = {}
    config["model"] |= {"block": "pre", "qk_norm": None}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [json.loads(line) | {"by_position": []} for line in (folder / "perplexity.jsonl").read_text().splitlines()]
    (folder / "perplexity.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    readme, *figures = write_language(read_runs([folder]), tmp_path / "out")
    assert "trained at window 128 on Alice's Adventures in Wonderland" in readme.read_text()
    assert [path.name for path in figures] == ["perplexity.png", "training.png"]
    data, problems = page_data([folder], tmp_path / "page.html")
    assert not problems
    assert data["sections"][0]["charts"][0]["trained"] == 128


def test_a_text_run_without_perplexity_cannot_be_reported(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS[0], tmp_path / "run")
    (tmp_path / "run" / "perplexity.jsonl").unlink()
    with pytest.raises(ValueError, match=r"it has no perplexity\.jsonl; run tra evaluate"):
        read_run(tmp_path / "run")
