"""Write an exported model as an ONNX file, and compare ONNX Runtime's logits with the model's.

python examples/onnx_export.py my-model my-model.onnx
"""

from __future__ import annotations

import sys

import onnxruntime
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import tra.hub  # noqa: F401 - registers the model


class Logits(nn.Module):
    """The model as a function of ids `[B, T]` alone. Its graph computes whole maps, so memory grows with T²."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids, use_cache=False).logits
        return logits


def main(source: str, target: str) -> None:
    """Write the model in folder `source` to the file `target`."""
    model, tokenizer = Logits(source).eval(), AutoTokenizer.from_pretrained(source)
    example = tokenizer(["Alice was beginning"] * 2, return_tensors="pt").input_ids
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)}
    torch.onnx.export(
        model, (example,), target, dynamo=True, dynamic_shapes={"input_ids": sizes}, input_names=["input_ids"]
    )
    session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    other = tokenizer("Down the rabbit hole, ", return_tensors="pt").input_ids  # of another size
    (found,) = session.run(None, {"input_ids": other.numpy()})
    with torch.no_grad():
        error = float((torch.from_numpy(found) - model(other)).abs().max())
    print(f"largest difference of the logits: {error:.1e}")
    assert error < 1e-3


if __name__ == "__main__":
    main(*sys.argv[1:3])
