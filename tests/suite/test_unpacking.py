"""Archives are refused for what they hold, before anything is written, and nothing of them is left."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tra.suite import unpacking
from tra.suite.archive import check_pack_target, merge, pack


def member(name: str, content: bytes = b"", **facts: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in facts.items():
        setattr(info, key, value)
    return info, content


def archive(file: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(file, mode) as tar:  # type: ignore[call-overload]
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return file


def link_chain(target: str) -> list[tuple[tarfile.TarInfo, bytes]]:
    """Return members that use CVE-2025-4517: short links to names so long that Python's filter loses the thread.

    Args:
        target: Where `escape/written` goes, as seen from the folder of the archive.
    """
    members, path = [], ""
    for step in "abcdefghijklmnop":
        members += [
            member(f"{path}{'d' * 247}", type=tarfile.DIRTYPE, mode=0o755),
            member(f"{path}{step}", type=tarfile.SYMTYPE, linkname="d" * 247),
        ]
        path += f"{'d' * 247}/"
    end = "/".join("abcdefghijklmnop") + "/" + "l" * 254
    return [
        *members,
        member(end, type=tarfile.SYMTYPE, linkname="../" * 16),
        member("escape", type=tarfile.SYMTYPE, linkname=f"{end}/{target}"),
        member("escape/written", b"outside"),
    ]


@pytest.mark.parametrize(
    "members",
    [
        [member("../evil", b"x")],
        [member("run/../../evil", b"x")],
        [member("/evil", b"x")],
        [member("run/link", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
        [member("run/link", type=tarfile.LNKTYPE, linkname="run/config.json")],
        [member("run/pipe", type=tarfile.FIFOTYPE)],
        [member("run/device", type=tarfile.CHRTYPE)],
        link_chain(".."),
        link_chain("../../../victim"),
    ],
)
def test_what_is_no_plain_file_within_is_refused(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    (tmp_path / "victim").mkdir()
    bad = archive(tmp_path / "a.tar.gz", member("run/config.json", b"{}"), *members)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"a\.tar\.gz is refused: '") as caught:
        merge([bad], tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    for second in ("run/config.json", "run/config.json/below"):
        bad = archive(tmp_path / "a.tar.gz", member("run/config.json", b"{}"), member(second, b"x"))
        with pytest.raises(ValueError, match="is in it twice, or below a file"):
            merge([bad], tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = archive(tmp_path / "a.tar.gz", member("run/zeros", bytes(2**22)), member("run/more", b"1"))
    monkeypatch.setattr(unpacking, "MAX_UNPACKED_BYTES", 2**20)
    with pytest.raises(ValueError, match=r"with 'run/zeros' it has 4,194,304 bytes, more than 1,048,576"):
        merge([bomb], tmp_path / "out")
    monkeypatch.setattr(unpacking, "MAX_UNPACKED_BYTES", 2**30)
    monkeypatch.setattr(unpacking, "MIN_FREE_BYTES", 2**60)
    with pytest.raises(ValueError, match=r"'run/zeros' it has 4,194,304 bytes, and the disk only .* free"):
        merge([bomb], tmp_path / "out")
    monkeypatch.setattr(unpacking, "MIN_FREE_BYTES", 0)
    monkeypatch.setattr(unpacking, "MAX_MEMBERS", 1)
    with pytest.raises(ValueError, match="more than 1 members, 'run/more' is one"):
        merge([bomb], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_hidden_folder_is_no_run(tmp_path: Path) -> None:
    """The folder .cache beside runs holds compiled code, which a suite's cells run."""
    bad = archive(tmp_path / "a.tar.gz", member(".cache/config.json", b"{}"), member(".cache/inductor/x.py", b"evil"))
    assert merge([bad], tmp_path / "out").taken == []
    assert not (tmp_path / "out").exists()


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    info, content = member("run/file", b"x")
    info.pax_headers = {"comment": "x" * 2**21}
    bomb = tmp_path / "a.tar.gz"
    with tarfile.open(bomb, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(content))
    with pytest.raises(ValueError, match=r"a\.tar\.gz is refused: a member has a header of"):
        merge([bomb], tmp_path / "out")


def test_links_in_a_run_folder_are_not_packed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "eval.jsonl").write_text("")
    (run / "notes").hardlink_to(run / "eval.jsonl")  # two names of a file are two files in the archive
    (tmp_path / "secret").write_text("mine")
    (run / "link").symlink_to(tmp_path / "secret")
    (run / "lock").write_text("")
    pack(tmp_path / "runs", tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as packed:
        assert [(one.name, one.isreg()) for one in packed] == [
            ("one/config.json", True),
            ("one/eval.jsonl", True),
            ("one/notes", True),
        ]
    pack(tmp_path / "runs", tmp_path / "a.tar.gz")  # over its own archive


def test_a_pack_target_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (tmp_path / "thesis.tex").write_text("mine")
    for target, message in (
        (run / "config.json", "lies in the run folder"),
        (run / "new.tar.gz", "lies in the run folder"),
        (tmp_path / "thesis.tex", "is no archive of runs, so it is not overwritten"),
        (tmp_path / "runs", "is a folder"),
        (archive(tmp_path / "other.tar.gz", member("thesis.tex", b"mine")), "is no archive of runs"),
    ):
        with pytest.raises(ValueError, match=message):
            check_pack_target(target)
        with pytest.raises(ValueError, match=message):
            pack(tmp_path / "runs", target)
    assert (run / "config.json").read_text() == "{}"
