"""torch.export, ExecuTorch's wrappers and ONNX, compared with the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

from tests.hub.models import language_model, tokens
from tests.slow import slow
from tra.hub import TRAForCausalLM

MECHANISMS = ["tra", "rope"]
ANY_LENGTH = [*MECHANISMS, *slow("cope", "forgetting", "alibi", "stickbreaking", "selective", "differential", "entmax")]
"""Not the LSTM, whose length PyTorch fixes."""


class Logits(nn.Module):
    """The model as a function of tensors alone."""

    def __init__(self, model: TRAForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mechanism", ANY_LENGTH)
def test_torch_export_takes_any_length(mechanism: str, masked: bool) -> None:
    module = Logits(language_model(mechanism).float()).eval()
    example: tuple[Tensor, ...] = (tokens(2, 16),)
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=4096)
    shapes: tuple[Any, ...] = ({0: batch, 1: length},)
    if masked:
        example, shapes = (*example, torch.ones(2, 16, dtype=torch.long)), shapes * 2
    program = torch.export.export(module, example, dynamic_shapes=shapes)
    for rows, size in ((1, 3), (3, 16), (2, 511), (1, 513), (1, 1100)):
        ids = tokens(rows, size)
        mask = (torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0),) if masked else ()
        with torch.no_grad():
            torch.testing.assert_close(program.module()(ids, *mask), module(ids, *mask), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mechanism", ANY_LENGTH)
def test_exported_graphs_have_no_operators_of_ours(mechanism: str) -> None:
    module = Logits(language_model(mechanism).float()).eval()
    program = torch.export.export(module, (tokens(2, 16),)).run_decompositions()
    ours = {str(node.target) for node in program.graph.nodes if str(node.target).startswith("tra")}
    assert not ours


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_executorch_s_wrapper_generates_the_same(mechanism: str) -> None:
    model = language_model(mechanism).float()
    model.generation_config = GenerationConfig(
        use_cache=True, cache_implementation="static", cache_config={"batch_size": 1, "max_cache_len": 32}
    )
    wrapper = TorchExportableModuleForDecoderOnlyLM(model)
    program = wrapper.export(input_ids=tokens(1, 1), cache_position=torch.tensor([0]), strict=False)
    ids = tokens(1, 6)
    said = wrapper.model.generate(program, ids, max_new_tokens=5)
    assert torch.equal(said, model.generate(ids, max_new_tokens=5, do_sample=False, cache_implementation=None))


@pytest.mark.parametrize("mechanism", ANY_LENGTH)
def test_onnx_runtime_agrees(mechanism: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module = Logits(language_model(mechanism).float()).eval()
    file = tmp_path / "model.onnx"
    shapes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)}}
    torch.onnx.export(module, (tokens(2, 16),), file, dynamo=True, dynamic_shapes=shapes, input_names=["input_ids"])
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for rows, size in ((1, 5), (2, 16), (3, 700)):
        ids = tokens(rows, size)
        (found,) = session.run(None, {"input_ids": ids.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), module(ids), rtol=1e-3, atol=1e-4)
