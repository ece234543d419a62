"""Choose tokens from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling: at temperature 0 the likeliest token is taken, otherwise a token is drawn.

    Logits are divided by the temperature, then limited to the `top_k`, then to the nucleus of the rest, as in
    transformers.
    """

    temperature: float = 0.0
    """Above 1 makes probabilities more equal, below 1 less."""
    top_k: int | None = None
    """Only this many of the likeliest tokens, and those as likely as the last of them."""
    top_p: float | None = None
    """Only the smallest set of tokens whose probability reaches it, and those as likely as the last of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    def filter(self, logits: Tensor) -> Tensor:
        """Return the logits to draw from, `[B, V]` in float32: the largest is 0, excluded tokens are -inf."""
        logits = logits.float()
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, TINY)  # so nothing overflows
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered = logits.sort(descending=True).values
            mass = ordered.softmax(-1)
            before = mass.cumsum(-1) - mass  # the mass of likelier tokens: 0 for the first, which always stays
            least = ordered.masked_fill(before >= self.top_p, torch.inf).amin(-1, keepdim=True)
            logits = logits.masked_fill(logits < least, -torch.inf)
        return logits

    def choose(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Return a token per row, `[B, V]` -> `[B, 1]`.

        With `noise` from Exp(1) it is drawn, by the Gumbel-max trick.
        """
        if noise is None:
            return logits.argmax(-1, keepdim=True)
        return (self.filter(logits) - noise.log()).argmax(-1, keepdim=True)


GREEDY = Sampling()
