"""A file of rows that can't be read whole is never written anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tra.runs import put_row, read_rows


@pytest.mark.parametrize("bad", [b'{"split": "i', b"[1]", b"\xff", b"[" * 10_000, b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_bad_line_stops_the_writer(tmp_path: Path, bad: bytes) -> None:
    file = tmp_path / "eval.jsonl"
    content = b'{"split": "iid"}\n' + bad + b'\n{"split": "dense"}\n'
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"eval\.jsonl, line 2, is damaged: "):
        put_row(file, {"split": "sparse"}, ("split",))
    assert file.read_bytes() == content


def test_only_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_text('{"split": "iid"}\n\n{"split": "de')
    assert read_rows(file) == [{"split": "iid"}]
    file.write_text('{"split": "iid"}\n{"split": "de\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(file)
