"""The guide's code runs as it is written, one block after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tra.hub.export import export_run
from tra.runs import RunFolder

GUIDE = Path(__file__).parent.parent / "docs/bounded-memory.md"


def run_blocks(*texts: str) -> dict[str, Any]:
    """Run the blocks of code that contain these texts, with shorter output, and return the names they leave."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    for block in blocks:
        if any(text in block for text in texts):
            exec(block.replace("1000", "20"), names)
    return names


def test_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_blocks("import torch\n", "guard=True", "serve(")
    assert names["text"].shape == (1, 20)
    *layers, first, second = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in layers] == ["256"] * 4
    assert {first[:2], second[:2]} == {"0 ", "1 "}


@pytest.mark.slow
def test_its_calibration_runs() -> None:
    names = run_blocks("import torch\n", "calibrate(")
    assert names["text"].shape == (1, 20)
    assert names["cache"].windows == tuple(map(tuple, names["found"].windows))
    assert max(map(max, names["found"].windows)) <= 512


def test_its_cache_of_transformers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export_run(RunFolder.open("flipflop-tra"), "my-model")
    names = run_blocks("import torch\n", "TRABoundedCache(")
    assert names["text"].shape == (1, 320)
