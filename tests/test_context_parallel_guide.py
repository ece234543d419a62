"""The guide's code runs as it is written, but for the length, with one process in place of several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.attention.test_cache import decoder

GUIDE = Path(__file__).parent.parent / "docs/context-parallel.md"


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert "length=1_048_576" in code
    model, tokens = decoder("tra").train(), torch.randint(11, (2, 64))
    store, start = dist.FileStore(str(tmp_path / "store"), 1), dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda _: start("gloo", store=store, rank=0, world_size=1))
    names: dict[str, Any] = {"decoder": model, "tokens": tokens, "targets": tokens.roll(-1, 1), "F": F}
    try:
        exec(code.replace("1_048_576", "64"), names)
    finally:
        dist.destroy_process_group()
    assert names["own"].shape == (2, 64)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), names["targets"].flatten())
    assert names["loss"].item() == pytest.approx(expected.item(), rel=1e-12)
    assert all(weight.grad is not None for weight in model.parameters())
