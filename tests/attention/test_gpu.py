"""Every mechanism on a CUDA device: as on the CPU, and compiled as not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tra
from tra.attention import MECHANISMS
from tra.attention.shared.inputs import AttentionInputs
from tra.training.loss import masked_cross_entropy

pytestmark = pytest.mark.gpu
MECHANISM = pytest.mark.parametrize("mechanism", list(MECHANISMS))
LENGTH = 256  # a multiple of 128, at which FlexAttention is used


def decoder(mechanism: str) -> tra.Decoder:
    torch.manual_seed(0)
    model = tra.Decoder(tra.DecoderConfig(50, d_model=128, n_layers=2, n_heads=4, mechanism=mechanism))
    with torch.no_grad():  # scores large enough to matter
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or name == "embed_tokens.weight":
                weight.mul_(3)
    return model.cuda()


def outcome(model: tra.Decoder, ids: Tensor, half: bool = False, compiled: bool = False) -> dict[str, Tensor]:
    """Logits and all gradients."""

    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(tokens)
        return logits, masked_cross_entropy(logits, tokens, torch.ones_like(tokens, dtype=torch.bool))

    torch._dynamo.reset()
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        logits, loss = (torch.compile(run, dynamic=False) if compiled else run)(ids)
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights)
    return {"logits": logits.detach()} | dict(zip(names, gradients, strict=True))


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def by_layer(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's weight and bias as one: the error of a bias of four numbers alone is a matter of luck.

    So is that of scalable softmax's four strengths, which multiply queries and go with their weights.
    """
    joined: dict[str, list[Tensor]] = {}
    for name, value in results.items():
        layer = name.removesuffix(".bias").removesuffix(".weight").replace("self_attn.strength", "self_attn.q_proj")
        joined.setdefault(layer, []).append(value.flatten())
    return {name: torch.cat(values) for name, values in joined.items()}


def assert_compiled_is_as_good(judge: dict[str, Tensor], plain: dict[str, Tensor], compiled: dict[str, Tensor]) -> None:
    """At most twice the error of the uncompiled form, or one rounding."""
    judge, plain, compiled = by_layer(judge), by_layer(plain), by_layer(compiled)
    for name, exact in judge.items():
        rounding = torch.finfo(plain["logits"].dtype).eps * rms(exact)
        error, allowed = rms(compiled[name] - exact), max(2 * rms(plain[name] - exact), rounding)
        assert error <= allowed, f"{name}: {error:.2e} of {rms(exact):.2e}, allowed {allowed:.2e}"


def tokens() -> Tensor:
    return torch.randint(50, (4, LENGTH), generator=torch.Generator().manual_seed(1)).cuda()


@MECHANISM
def test_the_gpu_is_the_cpu(mechanism: str) -> None:
    model = decoder(mechanism).cpu().double().eval()
    ids = torch.randint(50, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model.cuda()(ids.cuda()).cpu(), model.cpu()(ids), rtol=1e-9, atol=1e-9)


@MECHANISM
def test_compiled(mechanism: str) -> None:
    """In float32, against float64."""
    model, ids = decoder(mechanism), tokens()
    plain, compiled = (outcome(model, ids, compiled=on) for on in (False, True))
    assert_compiled_is_as_good(outcome(model.double(), ids), plain, compiled)


@MECHANISM
def test_compiled_in_half_precision(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float32, by the rule: plain has rounded scores, which blocks of rows otherwise leave as they are.

    Without a threshold, at which a rounded score may fall on the other side.
    """
    model, ids = decoder(mechanism), tokens()
    for block in model.layers:
        if hasattr(block.self_attn, "threshold"):
            block.self_attn.threshold = -torch.inf
    judge, compiled = outcome(model, ids), outcome(model, ids, half=True, compiled=True)
    exact_scores = tra.attention.scores

    def rounded_scores(given: AttentionInputs, rows: Tensor) -> Tensor:
        found = exact_scores(given, rows)
        return found + (found.to(torch.bfloat16) - found).detach()

    for module in ("shared.base", "cope", "stickbreaking", "tra_plain_distance"):
        monkeypatch.setattr(f"tra.attention.{module}.scores", rounded_scores)
    assert_compiled_is_as_good(judge, outcome(model, ids, half=True), compiled)
