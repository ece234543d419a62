"""Inputs on which the kernels are measured: random, sparse, or those of a trained model's heads."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.runs import RunFolder
from tra.tasks import generator
from tra.tasks.flipflop import FlipFlop

HEADS, TOKENS = 8, 32_768
SHIPPED = "flipflop-tra"
"""The trained model that the package ships."""


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    log_forget: Tensor


class Case(NamedTuple):
    """Shapes, gates (δ, or "init" for log σ(N(0, 1))), and which keys are kept."""

    width: int
    length: int
    gates: str = "init"
    content: str = "dense"

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.length)

    @property
    def bound(self) -> float:
        """Return the layer's promise."""
        return math.sqrt(self.width) * (1 + 2**-7)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Return normalised random queries and keys: half of the keys are kept, or 1 in 100, or none by 1 row in 64."""
    if case.content == "trained":
        drawn = FlipFlop(case.length + 2).sample("iid", 1, generator(0, "bench", device=device), device)
        return trained_inputs(RunFolder.open(SHIPPED), drawn.tokens[:, : case.length])
    draws = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(case.batch, HEADS, case.length, *shape, device=device, generator=draws)

    query, key = draw(case.width), draw(case.width)
    if case.content == "sparse":  # scores N(-m, 1), shifted along one direction, of which one in a hundred is positive
        quantile = 2.326
        share = quantile / (math.sqrt(case.width) + quantile)
        for x, sign in ((query, 1.0), (key, -1.0)):
            x[..., 1:] = F.rms_norm(x[..., 1:], (case.width - 1,)) * math.sqrt(1 - share)
            x[..., 0] = sign * math.sqrt(share * case.width)
    query, key = (F.rms_norm(x, (case.width,)) for x in (query, key))
    if case.content == "null rows":
        query[:, :, ::64] = 0.0
    gate = F.logsigmoid(draw()) if case.gates == "init" else torch.full_like(draw(), float(case.gates))
    return leaves(query, key, draw(case.width), gate)


def trained_inputs(run: RunFolder, tokens: Tensor) -> Inputs:
    """Return queries, keys, values and gates of a trained TRA run on one sequence `[1, T]`; layers are the batch."""
    model = run.load_model(tokens.device)
    if model.config.mechanism != "tra":
        raise ValueError(f"the kernels are TRA's, but {run.path} is of {model.config.mechanism}")
    found: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        for layer, x in model.attention_inputs(tokens):
            inputs = layer.prepare_inputs(x)
            found.append((inputs.query, inputs.key, inputs.value, layer.log_forget(x)))
    return leaves(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def leaves(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Inputs:
    query, key, value = (x.detach().to(torch.bfloat16).requires_grad_() for x in (query, key, value))
    return Inputs(query, key, value, log_forget.detach().float().requires_grad_())
