"""Runs that broke down in training are marked wherever they are shown, by their log alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.pages import make_maps, make_run, write_lines
from tests.report.test_figures import run
from tra.report import style
from tra.report.breakdowns import breakdown, footnotes, marks
from tra.report.figures import write_figures
from tra.report.head_ranking import head_scores, top_heads
from tra.report.heatmaps import panels
from tra.report.page.data import page_data
from tra.report.runs import EvaluatedRun, read_run
from tra.report.summary import write_summary
from tra.runs import read_attention


def logged(*losses: float) -> EvaluatedRun:
    found = run("rope", 0, 0.0)
    return EvaluatedRun(
        found.config, [], [{"step": 10 * n, "loss": loss} for n, loss in enumerate(losses, 1)], found.evaluation
    )


@pytest.mark.parametrize(
    "losses",
    [
        (4.0, 3.0, 2.0, 1.0),
        (4.0, 1e-5, 1e-3, 1e-4),  # ten times its best, and still all that was learnt
        (4.0, 1.0, 1.5, 1.1, 1.7),
        (4.0, 1.0, 4.0),  # too few lines to tell
        (),
    ],
)
def test_a_run_that_keeps_what_it_learnt(losses: tuple[float, ...]) -> None:
    assert breakdown(logged(*losses)) is None


def test_a_run_that_lost_it() -> None:
    found = breakdown(logged(4.0, 1.0, 0.02, 0.01, 3.0, 4.0))
    assert found == (0.01, 40, 4.0)
    assert footnotes([logged(4.0, 1.0, 0.02, 0.01, 3.0, 4.0)]) == [
        "† RoPE, seed 0, broke down: training loss 0.01 around step 40, 4 at the end."
    ]


def broken(folder: Path) -> Path:
    make_run(folder, "rope")
    losses = [1.0, 0.5, 0.1, 0.01, 0.9, 0.95]
    rows = [{"step": 50 * n, "loss": loss, "exact": 0.0, "accuracy": 0.0} for n, loss in enumerate(losses, 1)]
    write_lines(folder / "metrics.jsonl", rows)
    return folder


def test_tables_figures_and_the_page_mark_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make_run(tmp_path / "a", "tra"), broken(tmp_path / "b")]
    runs = [read_run(folder) for folder in folders]
    for one in runs:
        one.evaluation[0]["precision"] = "float32"
    assert marks(runs) == {"rope": " †"}
    words: dict[str, list[str]] = {}

    def keep(figure: Any, path: Path) -> None:
        legends = [legend for axes in figure.axes if (legend := axes.get_legend())]
        texts = [text for legend in legends for text in legend.get_texts()]
        words[path.name] = [
            text.get_text() for text in [*texts, *(text for axes in figure.axes for text in axes.texts)]
        ]

    monkeypatch.setattr(style, "save", keep)
    (tmp_path / "out").mkdir()
    write_summary(runs, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| split | length | sequences | tra | rope † |" in text
    assert "† RoPE, seed 0, broke down: training loss 0.01 around step 200, 0.95 at the end." in text
    for name in ("exact-match.png", "exact-by-length.png", "training.png"):
        assert {"TRA", "RoPE †", style.BROKE_DOWN} <= set(words[name]), name
    write_figures(runs[:1], tmp_path / "out")
    assert style.BROKE_DOWN not in words["training.png"]
    data, _ = page_data(folders, tmp_path / "page.html")
    (section,) = data["sections"]
    assert [group["label"] for group in section["groups"]] == ["TRA", "RoPE †"]
    assert "† RoPE, seed 0, broke down" in section["summary"][1]["text"]


def test_lines_in_one_place_all_show() -> None:
    """A later line lies above, and is thinner."""
    lines = list(style.line_styles(["tra", "rope", "forgetting"]).values())
    assert sorted(lines, key=lambda line: line["zorder"]) == sorted(lines, key=lambda line: -line["linewidth"]) == lines
    assert len({line["linewidth"] for line in lines}) == 3
    assert [line["linestyle"] == "-" for line in lines] == [True, False, False]


def test_telling_heads_look_at_single_keys_further_back(tmp_path: Path) -> None:
    maps = read_attention(make_maps(make_run(tmp_path / "a", "tra"), heads=3) / "attend.npz")
    weights = np.where(maps.weights > 0, 1, 0).astype(np.uint8)
    weights[:, :, :, 0] = 64  # on the first key, which tells nothing
    weights[1, 2, 4, 2] = 40  # where an answer is due
    weights[0, 1, 9, 3] = 64  # where none is
    maps = maps._replace(weights=weights)
    assert top_heads(maps, 1) == [(1, 2)]
    assert np.count_nonzero(head_scores(maps)) == 1
    assert top_heads(maps._replace(marked=np.array([], int)), 1) == [(0, 1)]
    assert top_heads(maps, 2) == [(0, 0), (1, 2)]


def test_few_heads_stand_in_a_row_beside_those_of_the_next_run(tmp_path: Path) -> None:
    many = read_attention(make_maps(make_run(tmp_path / "a", "tra"), layers=2, heads=3) / "attend.npz")
    few = read_attention(make_maps(make_run(tmp_path / "b", "rope"), layers=1, heads=2) / "attend.npz")
    places = [(panel.run, panel.row, panel.column) for panel in panels([many, few], 4)]
    assert places == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (1, 0, 4), (1, 0, 5)]
    assert len(panels([many, few])) == 8
