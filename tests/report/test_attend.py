"""What was attended to is read back as it was written, and a figure shows that and nothing else."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tra.report.heatmaps import draw_attention, panels, shown_symbol
from tra.runs import AttentionMaps, read_attention, write_arrays


def attended(rows: range = range(4), columns: range = range(4), **changes: Any) -> AttentionMaps:
    """Two layers of two heads. Weights are full where a query looks at the key before it, or at the first."""
    shape = (2, 2, len(rows), len(columns))
    before = np.array([[column == max(0, row - 1) for column in columns] for row in rows])
    found = AttentionMaps(
        symbols=np.array([f"k{column}" for column in columns]),
        row_symbols=np.array([f"q{row}" for row in rows]),
        rows=np.array(rows),
        columns=np.array(columns),
        marked=np.array([2]),
        layers=np.array([0, 3]),
        heads=np.array([1, 2]),
        weights=np.broadcast_to(np.where(before, 64, 0).astype(np.uint8), shape).copy(),
        content=np.zeros(shape, np.float16),
        distances=np.ones(shape, np.uint16),
        uncounted=np.zeros(shape, bool),
        null=np.zeros(shape[:3], bool),
        mechanism="tra",
        title="made up",
    )
    return found._replace(**changes)


def test_it_comes_back(tmp_path: Path) -> None:
    written = attended(symbols=np.array(["ä", " the", "\n", "<sep>"]))
    write_arrays(tmp_path / "attend.npz", written._asdict())
    found = read_attention(tmp_path / "attend.npz")
    assert all(np.array_equal(a, b) for a, b in zip(written, found, strict=True))
    assert (type(found.title), type(found.mechanism)) == (str, str)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no arrays")
    write_arrays(tmp_path / "other.npz", {"tokens": np.arange(3)})
    write_arrays(tmp_path / "short.npz", attended(rows=range(4))._replace(null=np.zeros((2, 2, 3), bool))._asdict())
    for name, message in (
        ("none.npz", "there is no file"),
        ("text.npz", "is not a file of tra attend"),
        ("other.npz", "is not a file of tra attend"),
        ("short.npz", r"its null are \(2, 2, 3\), expected \(2, 2, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            read_attention(tmp_path / name)


def test_a_file_of_a_former_version_has_no_keys_inside_a_margin(tmp_path: Path) -> None:
    written = attended()._asdict()
    del written["uncounted"]
    write_arrays(tmp_path / "attend.npz", written)
    found = read_attention(tmp_path / "attend.npz")
    assert (found.uncounted.shape, found.uncounted.any()) == (found.weights.shape, False)
    write_arrays(tmp_path / "bad.npz", written | {"uncounted": np.zeros((2, 2, 4, 3), bool)})
    with pytest.raises(ValueError, match=r"its uncounted are \(2, 2, 4, 3\), expected \(2, 2, 4, 4\)"):
        read_attention(tmp_path / "bad.npz")


def test_reading_needs_no_torch() -> None:
    source = Path(__file__).parents[2] / "tra/runs/attention_file.py"
    assert "torch" not in source.read_text()


def test_what_is_drawn_where() -> None:
    null = np.zeros((2, 2, 3), bool)
    null[1, 0, 2] = True
    first = attended(range(1, 4), null=null)
    found = panels([first, attended(range(1, 4), layers=np.array([7]), **sliced(first))])
    places = [(panel.run, panel.layer, panel.head, panel.row, panel.column) for panel in found]
    assert places == [
        (0, 0, 1, 0, 0),
        (0, 0, 2, 0, 1),
        (0, 3, 1, 1, 0),
        (0, 3, 2, 1, 1),
        (1, 7, 1, 0, 2),
        (1, 7, 2, 0, 3),
    ]
    assert [panel.null for panel in found] == [[], [], [2], [], [], []]
    assert all(panel.due == [1] for panel in found)  # the second of the rows 1, 2, 3
    nan = np.nan
    assert np.array_equal(
        found[0].weights, [[1, nan, nan, nan], [nan, 1, nan, nan], [nan, nan, 1, nan]], equal_nan=True
    )
    assert found[0].later.astype(int).tolist() == [[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]


def sliced(whole: AttentionMaps) -> dict[str, Any]:
    """Its first layer alone."""
    return {name: getattr(whole, name)[:1] for name in ("weights", "content", "distances", "uncounted", "null")}


def test_a_figure_s_pixels_are_its_cells(tmp_path: Path) -> None:
    """Dropped is white, later is grey, all of the weight is dark, and a frame is there where an answer is due."""
    one = attended(layers=np.array([0]), heads=np.array([0]), **{k: v[:, :1] for k, v in sliced(attended()).items()})
    draw_attention([one], tmp_path / "x.png")
    image = np.asarray(Image.open(tmp_path / "x.png").convert("RGB")).astype(int)
    darkest = np.argwhere((abs(image - [8, 29, 88]) < 12).all(-1))
    later = np.argwhere((abs(image - [0xE4, 0xE4, 0xE4]) < 3).all(-1))
    frame = np.argwhere((abs(image - [0xD5, 0x5E, 0x00]) < 12).all(-1))
    assert min(map(len, (darkest, later, frame))) > 50
    assert later[:, 0].mean() < darkest[:, 0].mean()  # above the diagonal


def test_keys_inside_the_margin_have_a_frame(tmp_path: Path) -> None:
    shape = (1, 1, 4, 4)
    parts = {k: v[:, :1] for k, v in sliced(attended()).items()}
    one = attended(layers=np.array([0]), heads=np.array([0]), marked=np.array([], int), **parts)
    inside = np.zeros(shape, bool)
    inside[0, 0, 3, 0] = True
    weights = one.weights.copy()
    weights[0, 0, 3, 0] = 2
    frames = {}
    for name, found in (("with", one._replace(weights=weights, uncounted=inside)), ("without", one)):
        draw_attention([found], tmp_path / f"{name}.png")
        image = np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB")).astype(int)
        panel = image[: int(0.8 * len(image))]  # without the legend
        frames[name] = np.argwhere((abs(panel - 0x9A) < 12).all(-1) & (np.arange(len(panel)) > 100)[:, None])
    framed = {tuple(place) for place in frames["with"].tolist()} - {
        tuple(place) for place in frames["without"].tolist()
    }
    assert len(framed) > 20
    assert panels([one._replace(uncounted=inside)])[0].uncounted.sum() == 1


def test_tokens_on_axes_are_seen_and_taken_literally(tmp_path: Path) -> None:
    assert [shown_symbol(text) for text in (" the", "a\n", "$x$", "\x07", "incomprehensible")] == [
        "␣the",
        "a↵",
        "$x$",
        "�",
        "incomprehen…",
    ]
    odd = np.array(["$x_{", "\\frac$", "\n", "%"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_attention([attended(symbols=odd, row_symbols=odd)], tmp_path / "odd.svg")
        draw_attention([attended(range(3, 4), range(1))], tmp_path / "one.png")


def test_runs_must_have_seen_the_same(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="different windows"):
        draw_attention([attended(), attended(range(1, 5))], tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"ends in .png, .svg or .pdf, got 'x.gif'"):
        draw_attention([attended()], tmp_path / "x.gif")
    assert not list(tmp_path.iterdir())
