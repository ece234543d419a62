"""A folder that is replaced is never lost, whatever happens between two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tra.runs import clear_folder_beside, locked_folder_beside, replace_folder, replacing


class KilledError(Exception):
    """Stands for a kill: nothing runs after it."""


def make(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "file").write_text(text)
    return folder


@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_new_folder_takes_the_place_of_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(replacing, "_exchange", lambda *_: False)
    target = make(tmp_path / "store", "old")
    with locked_folder_beside(target, "preparing", "prepared") as place:
        replace_folder(make(place / "store", "new"), target, place)
    assert (target / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_next_run_puts_an_old_folder_back(tmp_path: Path) -> None:
    """As a kill between two renames leaves it, where folders can't be exchanged."""
    make(tmp_path / ".store.preparing" / "replaced", "old")
    make(tmp_path / ".store.preparing" / "store", "new")
    clear_folder_beside(tmp_path / "store", "preparing")
    assert (tmp_path / "store" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_an_error_between_the_renames_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "_exchange", lambda *_: False)
    target = make(tmp_path / "store", "old")
    with (
        pytest.raises(FileNotFoundError),
        locked_folder_beside(target, "preparing", "prepared") as place,
    ):
        replace_folder(place / "missing", target, place)
    assert (target / "file").read_text() == "old"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    thesis = make(tmp_path / "thesis", "mine")
    (tmp_path / ".store.preparing").symlink_to(thesis)
    clear_folder_beside(tmp_path / "store", "preparing")
    with (
        pytest.raises(ValueError, match="is in the way: it is a link"),
        locked_folder_beside(tmp_path / "store", "preparing", "prepared"),
    ):
        pass
    assert (thesis / "file").read_text() == "mine"
