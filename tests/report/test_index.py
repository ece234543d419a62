"""The page of all results says what lies there, and nothing lies there unsaid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tra.report.index import index_text, write_index

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "task/README.md",
        "task/a/config.json",
        "task/b/config.json",
        "task/fit.png",
        "bench/op.json",
        "bench/op.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "index.json").write_text(json.dumps({"task": "a task", "bench/op.json": "speed"}))
    return tmp_path


def test_the_committed_page_is_current() -> None:
    assert (RESULTS / "README.md").read_text() == index_text(RESULTS)


def test_a_line_has_runs_and_figures(folder: Path) -> None:
    lines = write_index(folder).read_text().splitlines()
    assert lines[-2:] == [
        "| [task](task/README.md) | a task | 2 | [fit](task/fit.png) |",
        "| [bench/op.json](bench/op.json) | speed |  | [op](bench/op.png) |",
    ]
    assert write_index(folder).read_text().splitlines() == lines  # its own page needs no line


def test_nothing_is_left_unsaid(folder: Path) -> None:
    (folder / "bench/new.json").touch()
    with pytest.raises(ValueError, match=r"bench/new.json has no line in .*index.json"):
        index_text(folder)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ('{"task": "a task", "bench": "speed", "gone": "…"}', "index.json describes gone, which is not in"),
        ('{"task": 1}', "must hold one object"),
        ("{", "is not JSON"),
    ],
)
def test_descriptions_that_do_not_fit(folder: Path, described: str, message: str) -> None:
    (folder / "index.json").write_text(described)
    with pytest.raises(ValueError, match=message):
        index_text(folder)
    (folder / "index.json").unlink()
    with pytest.raises(ValueError, match=r"has no index.json"):
        index_text(folder)
