"""The scripts of docs/with-transformers.md, on a tiny model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.hub.test_export import make_text_export

ROOT = Path(__file__).parents[2]
NEEDS = {
    "finetune_packed": ("accelerate",),
    "lora": ("accelerate", "peft"),
    "sft_chat": ("accelerate", "datasets", "trl"),
    "onnx_export": ("onnx", "onnxscript", "onnxruntime"),
    "classify": ("accelerate",),
}
"""The scripts, and the packages without which they are skipped."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_export(tmp_path_factory.mktemp("examples"))


@pytest.mark.parametrize("name", list(NEEDS))
def test_runs(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"examples/{name}.py needs the package {package}")
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec
    assert spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.chdir(tmp_path)
    if name == "onnx_export":
        example.main(str(model), "model.onnx")
        assert Path("model.onnx").is_file()
        return
    example.main(str(model), "out", steps=2)
    loader = AutoModelForSequenceClassification if name == "classify" else AutoModelForCausalLM
    assert loader.from_pretrained("out").num_parameters() > 0


def test_the_page_names_every_script() -> None:
    page = (ROOT / "docs" / "with-transformers.md").read_text()
    for name in NEEDS:
        assert f"](../examples/{name}.py)" in page
