"""The examples that need nothing but the package; those for transformers are tested in tests/hub."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_the_operator_in_ones_own_module() -> None:
    """It learns, and holds at 8 times the length."""
    example = runpy.run_path(str(EXAMPLES / "own_module.py"))
    assert example["main"](steps=80) > 0.95


def test_ones_own_module_goes_on_from_its_cache() -> None:
    import torch

    example = runpy.run_path(str(EXAMPLES / "own_module.py"))
    torch.manual_seed(0)
    block, x = example["Block"](32, heads=4, kv_heads=2).double(), torch.randn(2, 12, 32).double()
    with torch.no_grad():
        whole, _ = block(x)
        first, cached = block(x[:, :7])
        rest, _ = block(x[:, 7:], cached)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole)


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Cell after cell, in one namespace, as a kernel does."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "show", lambda: None)
    names: dict[str, Any] = {}
    cells = json.loads((EXAMPLES / "demo_to_maps.ipynb").read_text())["cells"]
    with mpl.rc_context({"backend": "agg"}):
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    plt.close("all")
    assert names["losses"][-1] < names["losses"][0] / 2
    assert {result.exact for result in names["results"]} == {1.0}
    printed = capsys.readouterr().out
    assert "1.0 on the last write" in printed
    assert (names["short"] - names["long"]).abs().max() < 1e-6


def test_the_notebook_has_its_outputs() -> None:
    cells = json.loads((EXAMPLES / "demo_to_maps.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error"]
