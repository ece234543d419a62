"""The measurement of preparation measures something."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prepare import bench_prepare, main
from tra.text import shipped_text


@pytest.mark.slow
def test_a_row_per_size(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(10 * shipped_text().read_bytes())
    result = bench_prepare(tmp_path / "text.txt", megabytes=(1,))
    (row,) = result["rows"]
    assert result["text"] == "text.txt"
    assert 0.99 < row["megabytes"] <= 1
    assert row["seconds"] > 0
    assert row["peak_mib"] > 50


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*none\.txt"):
        main([str(tmp_path / "none.txt")])
    with pytest.raises(SystemExit, match="2"):
        main(["a.txt", "b.txt"])
    (tmp_path / "a.txt").write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"is not UTF-8 text"):
        bench_prepare(tmp_path / "a.txt", megabytes=(1,))
