"""The guide's code runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tra
from tests.attention.test_cache import decoder, tokens
from tests.hub.models import language_model
from tests.hub.models import tokens as hub_tokens

GUIDE = Path(__file__).parent.parent / "docs/bounded-memory.md"


def blocks_with(text: str) -> list[str]:
    """Return blocks of code that contain a text, shortened."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 5
    return [block.replace("1000", "20") for block in blocks if text in block]


def test_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"model": decoder("tra").float(), "tokens": tokens(2, 300)}
    caches, serving = blocks_with("windows=256"), blocks_with("serve(")
    assert (len(caches), len(serving)) == (2, 1)
    for block in (*caches, *serving):
        exec(block, names)
    *layers, first, second = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in layers] == ["256", "256"]
    assert {first[:2], second[:2]} == {"0 ", "1 "}


@pytest.mark.slow
def test_its_calibration_runs() -> None:
    (block,) = blocks_with("calibrate(")
    names: dict[str, Any] = {"BoundedCache": tra.BoundedCache, "prompt": tokens(1, 40) % 5}
    exec(block, names)
    assert names["text"].shape == (1, 20)
    assert max(names["windows"]) <= 512


def test_its_cache_of_transformers_runs() -> None:
    (block,) = blocks_with("TRABoundedCache(")
    names: dict[str, Any] = {"model": language_model(), "windows": [5, 9], "prompt": hub_tokens(1, 40)}
    exec(block, names)
    assert names["text"].shape == (1, 60)
