"""Selective attention (Leviathan et al. 2024): a token can mask others for all that come later."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tra.attention.shared.base import Attention, Given, key_places, scores, seen
from tra.attention.shared.row_blocks import rows_at_once


class SelectiveAttention(Attention):
    """Softmax over `S_ij - Σ relu(S⁰_kj)`, the sum over tokens k after j and before i, S⁰ the scores of head 0.

    A token doesn't mask itself, and nothing masks the first. Queries and keys are normalised, as published; positions
    were learnt there, which ends at the training length, so these are `rope`'s. See `Attention`.
    """

    default_qk_norm: ClassVar[bool] = True
    default_rotary: ClassVar[bool] = True
    caches_more: ClassVar[bool] = True

    def attend(self, given: Given) -> Tensor:
        group = self.n_heads // self.n_kv_heads
        key, value = (y.repeat_interleave(group, dim=1) for y in (given.key, given.value))

        def read_rows(rows: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
            masking, masked = self._masking(given, rows, masked)
            bias = (-masking[:, None]).masked_fill(~seen(given, rows), -torch.inf).to(key.dtype)
            bias = bias.expand(-1, self.n_heads, -1, -1)
            query = given.query[:, :, rows]
            return F.scaled_dot_product_attention(query, key, value, bias, dropout_p=self.dropout_now), masked

        masked, read = self._masked_before(given), []
        blocks = torch.arange(given.query.shape[2], device=key.device).split(rows_at_once(given))
        for rows in blocks:
            if len(blocks) > 1 and torch.is_grad_enabled():
                out, masked = checkpoint(read_rows, rows, masked, use_reentrant=False)
            else:
                out, masked = read_rows(rows, masked)
            read.append(out)
        if given.cache is not None:
            given.cache.state["masked"] = masked
        return torch.cat(read, dim=2)

    def logits(self, given: Given, rows: Tensor) -> Tensor:
        """Masking builds up row by row, so all rows before the last one asked for are gone through."""
        masked, found = self._masked_before(given), []
        for block in torch.arange(int(rows.max()) + 1, device=rows.device).split(rows_at_once(given)):
            masking, masked = self._masking(given, block, masked)
            inside = (rows >= block[0]) & (rows <= block[-1])
            found.append((inside.nonzero()[:, 0], masking[:, rows[inside] - block[0]]))
        place = torch.cat([where for where, _ in found])
        masking = torch.cat([m for _, m in found], dim=1)[:, place.argsort()]
        return super().logits(given, rows) - masking[:, None]

    def _masked_before(self, given: Given) -> Tensor:
        """`[B, Tk]`: what earlier tokens, those in the cache, have taken off each key."""
        batch, _, n_keys, _ = given.key.shape
        if given.cache is None or "masked" not in given.cache.state:
            dtype = torch.float64 if given.query.dtype == torch.float64 else torch.float32
            return torch.zeros(batch, n_keys, dtype=dtype, device=given.key.device)
        masked = given.cache.state["masked"]
        return F.pad(masked, (0, n_keys - masked.shape[1]))

    def _masking(self, given: Given, rows: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """What each of the rows finds taken off each key, `[B, R, Tk]`, and what the next row will find, `[B, Tk]`."""
        first_head = given._replace(query=given.query[:, :1], key=given.key[:, :1])
        index = torch.arange(given.key.shape[2], device=rows.device)
        maskable = seen(given, rows)[:, 0] & (index != (given.past + rows)[:, None])
        maskable = maskable & (key_places(given) > 0)[:, None]
        if given.key_mask is not None:  # padding masks nothing
            maskable = maskable & given.key_mask[:, given.past + rows, None]
        taken = scores(first_head, rows)[:, 0].relu().masked_fill(~maskable, 0.0)
        after = before[:, None] + taken.cumsum(1)
        return after - taken, after[:, -1]
