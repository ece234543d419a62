"""Rotary position embedding (Su et al. 2021), with the paper's base of 500,000."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tra.attention._base import Attention, positions, softmax_attention


class RotaryAttention(Attention):
    """Softmax attention whose queries and keys are rotated by an angle that grows with position.

    Args:
        d_model, n_heads, n_kv_heads, qk_norm, dropout: See `Attention`.
        rope_theta: Base of the wavelengths.
    """

    config_fields: ClassVar[tuple[str, ...]] = ("rope_theta",)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        qk_norm: bool | None = None,
        dropout: float = 0.0,
        rope_theta: float = 500_000.0,
    ) -> None:
        super().__init__(d_model, n_heads, n_kv_heads, qk_norm=qk_norm, dropout=dropout)
        if self.head_width % 2:
            raise ValueError(f"rope needs an even head width, got {self.head_width}")
        self.rope_theta = rope_theta

    def place(self, query: Tensor, key: Tensor, key_mask: Tensor | None, past: int) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        angle = _angles(positions(query, key_mask, past), self.head_width, self.rope_theta, dtype)
        return rotate(query, angle), rotate(key, angle)

    def attend(
        self,
        x: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        document_ids: Tensor | None,
    ) -> Tensor:
        return softmax_attention(query, key, value, key_mask, document_ids, self.dropout if self.training else 0.0)


def _angles(position: Tensor, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    """`[B, T]` -> `[B, 1, T, width / 2]`, in float32 at least: bf16 can't tell far positions apart."""
    frequency = theta ** (-torch.arange(0, width, 2, device=position.device, dtype=dtype) / width)
    return position[:, None, :, None].to(dtype) * frequency


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + width/2}) of `[B, H, T, width]`."""
    first, second = x.to(angle.dtype).chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
