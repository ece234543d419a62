"""Figures by what they show: the data of each, worked out by hand, and which figures runs have."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from tra.attention import MECHANISMS
from tra.report import style
from tra.report.curve_figures import exact_curves, failure_curves, training_curves
from tra.report.exact_match import draw_exact_match
from tra.report.figures import figures, links, write_figures
from tra.report.heads import head_grids, kept_curves
from tra.report.names import COLOURS, NAMES
from tra.report.runs import EvaluatedRun, read_runs
from tra.report.style import length_ticks, line_styles, split_into_panels

RIVALS = Path(__file__).parents[2] / "results/rivals"


def evaluated(split: str, length: int, exact: float) -> dict[str, Any]:
    return {"split": split, "longest": length, "exact": exact, "low": exact - 0.1, "high": exact + 0.2}


def run(mechanism: str, seed: int, exact: float, diagnosis: list[dict[str, Any]] | None = None) -> EvaluatedRun:
    """Steps 1 and 2, and the lengths 64, also in a harder form, and 256."""
    config = {"task": {"name": "flipflop"}, "model": {"mechanism": mechanism}, "train": {"seed": seed}}
    metrics = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.01 * 100**seed}]
    rows = [evaluated("4x", 256, exact / 2), evaluated("iid", 64, exact), evaluated("sparse", 64, 0.0)]
    return EvaluatedRun(config, [], metrics, rows, diagnosis or [], [])


def diagnosed(length: int, **measures: Any) -> dict[str, Any]:
    return {"split": f"{length}", "longest": length, **measures}


def test_bars_say_what_a_test_set_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []

    def keep(figure: Any, _: Path) -> None:
        labels.extend(label.get_text() for label in figure.axes[0].get_xticklabels())

    monkeypatch.setattr(style, "save", keep)
    draw_exact_match({"tra": [evaluated("iid", 64, 1.0), evaluated("4x", 1024, 1.0)]}, tmp_path / "bars.png")
    assert labels == ["iid\n64\nas trained", "4x\n1,024"]


def test_one_seed_has_its_interval() -> None:
    (curve,) = exact_curves([run("tra", 0, 0.5)]).values()
    assert curve.x == [64, 256]
    assert curve.middle == [0.5, 0.25]
    assert curve.low == pytest.approx([0.4, 0.15])
    assert curve.high == pytest.approx([0.7, 0.45])


def test_several_seeds_have_their_range() -> None:
    curves = exact_curves([run("rope", 0, 0.2), run("tra", 0, 1.0), run("tra", 1, 0.5), run("tra", 2, 0.6)])
    assert list(curves) == ["tra", "rope"]  # as tables have them
    assert curves["tra"].middle == pytest.approx([0.7, 0.35])
    assert (curves["tra"].low, curves["tra"].high) == ([0.5, 0.25], [1.0, 0.5])


def test_failures_are_means_over_heads_and_seeds() -> None:
    rows = [
        [diagnosed(64, negative_mass=[[0.0, 0.2], [0.4, None]], reversed=None, lifted=[[None]])],
        [
            diagnosed(64, negative_mass=[[0.4, 0.4], [0.4, 0.4]]),
            diagnosed(64, negative_mass=[[1.0]]) | {"split": "harder"},
        ],
    ]
    found = failure_curves([run("rope", seed, 1.0, row) for seed, row in enumerate(rows)])
    assert list(found) == ["negative_mass"]  # nothing was seen of the others
    (curve,) = found["negative_mass"].values()
    assert curve.x == [64]
    assert [curve.middle[0], curve.low[0], curve.high[0]] == pytest.approx([0.3, 0.2, 0.4])


def test_heads_are_those_of_the_greatest_length() -> None:
    short, long = diagnosed(64, log_forget=[[-9, -9]], reach=None), diagnosed(256, log_forget=[[-1, None], [-3, -4]])
    alone = head_grids([run("tra", 0, 1.0, [long, short])])
    assert list(alone) == ["log_forget"]
    grid = alone["log_forget"]["tra"]
    assert (grid.length, grid.layers) == (256, ["0", "1"])
    assert np.array_equal(grid.values, [[-1, np.nan], [-3, -4]], equal_nan=True)
    both = head_grids([run("tra", 0, 1.0, [long]), run("tra", 1, 1.0, [short]), run("rope", 0, 1.0)])["log_forget"]
    assert list(both) == ["tra"]
    assert both["tra"].layers == ["0.0", "0.1", "1.0"]


def test_keys_kept_by_layer() -> None:
    rows = [[diagnosed(64, kept=[[0.1, 0.3], [0.5, 0.5]])], [diagnosed(64, kept=[[0.4, 0.4], [0.7, 0.9]])]]
    found = kept_curves([run("tra", seed, 1.0, row) for seed, row in enumerate(rows)] + [run("rope", 0, 1.0)])["kept"]
    assert list(found) == ["tra"]
    first, second = ([curve.middle[0], curve.low[0], curve.high[0]] for curve in found["tra"])
    assert first == pytest.approx([0.3, 0.2, 0.4])
    assert second == pytest.approx([0.65, 0.5, 0.8])


def test_losses_are_geometric_means() -> None:
    (curve,) = training_curves([run("tra", 0, 1.0), run("tra", 1, 1.0)]).values()
    assert curve.x == [1, 2]
    assert curve.middle == pytest.approx([1.0, 0.1])
    assert (curve.low, curve.high) == ([1.0, 0.01], [1.0, 1.0])


def test_runs_have_the_figures_that_there_is_data_for(tmp_path: Path) -> None:
    bare = [run("tra", 0, 1.0), run("rope", 0, 0.5)]
    assert [figure.file for figure in figures(bare)] == ["exact-by-length.png", "training.png"]
    diagnosis = [diagnosed(64, negative_mass=[[0.1]], kept=[[0.5]], reach=[[3.0]])]
    whole = [run("tra", 0, 1.0, diagnosis), run("rope", 0, 0.5)]
    paths = write_figures(whole, tmp_path)
    assert [path.name for path in paths] == [
        "exact-by-length.png",
        "failures.png",
        "heads.png",
        "kept.png",
        "training.png",
    ]
    assert links(whole, "kept.png") == ["", "![share of keys kept by layer](kept.png)"]
    assert len(links(whole)) == 10


@pytest.mark.slow
def test_committed_runs_are_drawn_as_they_are(tmp_path: Path) -> None:
    """All mechanisms and seeds: a curve each, means as in eval.jsonl; figures small enough to keep."""
    runs = read_runs(sorted(path for path in RIVALS.iterdir() if path.is_dir()))
    curves = exact_curves(runs)
    assert list(curves) == list(NAMES)
    rows = [map(json.loads, (RIVALS / f"cope-{seed}/eval.jsonl").read_text().splitlines()) for seed in range(3)]
    at_4x = [row["exact"] for row in itertools.chain(*rows) if row["split"] == "4x"]
    cope = curves["cope"]
    found = [part[1] for part in (cope.x, cope.middle, cope.low, cope.high)]
    assert found == pytest.approx([256, sum(at_4x) / 3, min(at_4x), max(at_4x)])
    for path in write_figures(runs, tmp_path):
        assert path.stat().st_size < 120_000
        assert Image.open(path).size == Image.open(RIVALS / path.name).size


def test_mechanisms_can_be_told_apart_in_grey() -> None:
    assert set(NAMES) == set(COLOURS) == set(MECHANISMS)
    assert len(set(COLOURS.values())) == len(COLOURS)
    groups = split_into_panels(list(NAMES))
    assert [len(group) for group in groups] == [4, 5, 5, 5]
    assert {name for group in groups for name in group} == set(NAMES)
    for group in [*groups, ["tra", "rope", "forgetting", "cope"]]:
        assert len({str(line["linestyle"]) for line in line_styles(group).values()}) == len(group)
        assert len({line["marker"] for line in line_styles(group).values()}) == len(group)
    assert split_into_panels(["rope", "tra"]) == [["rope", "tra"]]


def test_lengths_that_stand_close_share_a_number() -> None:
    axes = plt.figure().subplots()
    length_ticks(axes, [50, 100, 150, 200, 250, 300, 400, 800, 3200])
    assert "|".join(label.get_text() for label in axes.get_xticklabels()) == "50|100|150|200||300|400|800|3,200"
    length_ticks(axes, [512, 1024, 2048, 32_768])
    assert "|".join(label.get_text() for label in axes.get_xticklabels()) == "512|1k|2k|32k"
