"""The operator in a module of your own: projections, norms, a gate, and a cache of two tensors.

`tra.ThresholdRelativeAttention` has all of this and more. This example is for models that have their own projections.
It learns to predict, at every position, the last symbol below 4 that was read; the other symbols are noise.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tra

BF16_ROUNDING = 1 + 2**-7
"""Factor by which a norm may exceed its value once queries and keys are rounded to bfloat16."""


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int, margin: float = 2.0) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width, self.margin = heads, kv_heads, width // heads, margin
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_width, bias=False)
        self.gate = nn.Linear(width, heads)  # one δ per query and head
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cached: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the block's output `[B, T, width]`, and keys and values of all tokens so far."""
        h = self.norm(x)
        heads = self.qkv(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [B, H + 2 Hkv, T, D]
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query, key = (F.rms_norm(y, (self.head_width,)) for y in (query, key))  # no learned scale: scores stay bounded
        if cached is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(cached, (key, value), strict=True))
        gates = self.gate(h)
        gates = gates.to(torch.promote_types(gates.dtype, torch.float32))  # δ is float32 at least
        attended = tra.threshold_relative_attention(
            query,
            key,
            value,
            F.logsigmoid(gates).transpose(1, 2),  # [B, H, T]
            margin=self.margin,
            score_bound=math.sqrt(self.head_width) * BF16_ROUNDING,  # lets a walk stop without reading norms of keys
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x)), (key, value)


class Model(nn.Module):
    """Two blocks over symbols. No positions are added to the input."""

    def __init__(self, symbols: int, width: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(symbols, width), nn.Linear(width, symbols)
        self.blocks = nn.ModuleList(Block(width, heads=4, kv_heads=2) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return tokens `[rows, length]`, drawn from 16 symbols, and targets: the last symbol below 4."""
    tokens = torch.randint(16, (rows, length))
    tokens[:, 0] = torch.randint(4, (rows,))
    place = torch.where(tokens < 4, torch.arange(length), 0).cummax(dim=1).values
    return tokens, tokens.gather(1, place)


def main(steps: int = 80) -> float:
    """Train on 32 symbols, and return the share of right answers on 256."""
    torch.manual_seed(0)
    model = Model(symbols=16)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens, targets = batch(32, 32)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    tokens, targets = batch(32, 256)
    with torch.no_grad():
        right = (model(tokens).argmax(-1) == targets).float().mean().item()
    print(f"8 times as long: {right:.3f} of the answers are right")
    return right


if __name__ == "__main__":
    main()
