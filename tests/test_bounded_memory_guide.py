"""The guide's code runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.attention.test_cache import decoder, tokens

GUIDE = Path(__file__).parent.parent / "docs/bounded-memory.md"


def test_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"model": decoder("tra").float(), "tokens": tokens(2, 300)}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(block.replace("1000", "20"), names)
    *layers, first, second = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in layers] == ["256", "256"]
    assert {first[:2], second[:2]} == {"0 ", "1 "}
