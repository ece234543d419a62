"""Selective attention (Leviathan et al. 2024): a token can mask others for all that come later."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tra.attention.shared.base import Attention
from tra.attention.shared.inputs import AttentionInputs, key_positions, scores, visible_keys
from tra.attention.shared.row_blocks import max_rows_at_once, row_blocks


class SelectiveAttention(Attention):
    """Softmax over `S_ij - Σ relu(S⁰_kj)`, the sum over tokens k after j and before i, S⁰ the scores of head 0.

    A token doesn't mask itself, and no token masks the first. Queries and keys are normalised, as published. The
    published positions are learnt, so they end at the training length; positions here are those of `rope`. See
    `Attention`.
    """

    default_qk_norm: ClassVar[bool] = True
    default_rotary: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = True

    def attend(self, inputs: AttentionInputs) -> Tensor:
        group = self.n_heads // self.n_kv_heads
        key, value = (y.repeat_interleave(group, dim=1) for y in (inputs.key, inputs.value))

        def read_rows(rows: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
            masking, masked = self._masking(inputs, rows, masked)
            bias = (-masking[:, None]).masked_fill(~visible_keys(inputs, rows), -torch.inf).to(key.dtype)
            bias = bias.expand(-1, self.n_heads, -1, -1)
            query = inputs.query[:, :, rows]
            return F.scaled_dot_product_attention(query, key, value, bias, dropout_p=self.dropout_now), masked

        masked, read, blocks = self._masked_before(inputs), [], row_blocks(inputs)
        for rows in blocks:
            if len(blocks) > 1 and torch.is_grad_enabled():
                out, masked = checkpoint(read_rows, rows, masked, use_reentrant=False)
            else:
                out, masked = read_rows(rows, masked)
            read.append(out)
        if inputs.cache is not None:
            inputs.cache.state["masked"] = masked
        return torch.cat(read, dim=2)

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        """See `Attention`. Masking accumulates row by row, so all rows up to the last requested one are computed."""
        masked, found = self._masked_before(inputs), []
        for block in torch.arange(int(rows.max()) + 1, device=rows.device).split(max_rows_at_once(inputs)):
            masking, masked = self._masking(inputs, block, masked)
            inside = (rows >= block[0]) & (rows <= block[-1])
            found.append((inside.nonzero()[:, 0], masking[:, rows[inside] - block[0]]))
        order = torch.cat([index for index, _ in found]).argsort()
        masking = torch.cat([m for _, m in found], dim=1)[:, order]
        if inputs.cache is not None:
            inputs.cache.state["masked"] = masked
        return super().logits(inputs, rows) - masking[:, None]

    def _masked_before(self, inputs: AttentionInputs) -> Tensor:
        """Return what the cached tokens have subtracted from each key's score, `[B, Tk]`."""
        batch, _, n_keys, _ = inputs.key.shape
        if inputs.cache is None or "masked" not in inputs.cache.state:
            dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
            return torch.zeros(batch, n_keys, dtype=dtype, device=inputs.key.device)
        masked = inputs.cache.state["masked"]
        return F.pad(masked, (0, n_keys - masked.shape[1]))

    def _masking(self, inputs: AttentionInputs, rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is subtracted from each key's score, for `rows` `[B, R, Tk]` and for the next row `[B, Tk]`."""
        first_head = inputs._replace(query=inputs.query[:, :1], key=inputs.key[:, :1])
        index = torch.arange(inputs.key.shape[2], device=rows.device)
        maskable = visible_keys(inputs, rows)[:, 0] & (index != (inputs.past + rows)[:, None])
        maskable = maskable & (key_positions(inputs) > 0)[:, None]
        if inputs.key_mask is not None:  # padding masks nothing
            maskable = maskable & inputs.key_mask[:, inputs.past + rows, None]
        subtracted = scores(first_head, rows)[:, 0].relu().masked_fill(~maskable, 0.0)
        after = before[:, None] + subtracted.cumsum(1)
        return after - subtracted, after[:, -1]
