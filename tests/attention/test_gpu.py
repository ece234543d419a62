"""Every mechanism on a CUDA device: as on the CPU, and compiled as not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tra
from tra.attention import MECHANISMS
from tra.model import masked_cross_entropy

pytestmark = pytest.mark.gpu
MECHANISM = pytest.mark.parametrize("mechanism", list(MECHANISMS))
LENGTH = 256  # a multiple of 128, at which FlexAttention is used


def decoder(mechanism: str) -> tra.Decoder:
    torch.manual_seed(0)
    model = tra.Decoder(tra.DecoderConfig(50, d_model=128, n_layers=2, n_heads=4, mechanism=mechanism))
    with torch.no_grad():  # scores large enough to matter
        for name, weight in model.named_parameters():
            if "query" in name or "key" in name or name == "embedding.weight":
                weight.mul_(3)
    return model.cuda()


def outcome(model: tra.Decoder, ids: Tensor, half: bool, compiled: bool = False) -> dict[str, Tensor]:
    """Logits and all gradients, in float32."""

    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(tokens)
        return logits, masked_cross_entropy(logits, tokens, torch.ones_like(tokens, dtype=torch.bool))

    torch._dynamo.reset()
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        logits, loss = (torch.compile(run, dynamic=False) if compiled else run)(ids)
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights)
    return {"logits": logits.detach().float()} | dict(zip(names, gradients, strict=True))


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@MECHANISM
def test_the_gpu_is_the_cpu(mechanism: str) -> None:
    model = decoder(mechanism).cpu().double().eval()
    ids = torch.randint(50, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model.cuda()(ids.cuda()).cpu(), model.cpu()(ids), rtol=1e-9, atol=1e-9)


@MECHANISM
def test_compiled_in_half_precision(mechanism: str) -> None:
    """The error of the compiled form is at most twice the uncompiled form's, both against float32."""
    model = decoder(mechanism)
    ids = torch.randint(50, (4, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()
    exact, plain, compiled = (
        outcome(model, ids, half, on) for half, on in ((False, False), (True, False), (True, True))
    )
    for name, judge in exact.items():
        allowed = max(2 * rms(plain[name] - judge), 2**-8 * rms(judge))
        assert rms(compiled[name] - judge) <= allowed, name
