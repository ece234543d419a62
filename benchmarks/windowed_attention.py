"""Run the attention of rivals over a sliding window, with or without the first tokens: common ways to bound a cache.

A window of W keys holds the query's own key and the newest ones before it. With S sinks, the first S tokens of the text
stay besides the W - S newest (StreamingLLM, Xiao et al. 2024). Rotary positions are then positions within the cache, so
that a sink is never further away than W - 1. A forget gate forgets sinks as it does in the whole text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tra.attention import AttentionInputs, ForgettingAttention, RotaryAttention
from tra.attention.shared.rotation import rotate_by_position
from tra.model import Decoder

WINDOWED = (RotaryAttention, ForgettingAttention)

MAX_CELLS = {"cpu": 2**22, "cuda": 2**28}
"""Entries of the map that are computed at once."""


@contextmanager
def sliding_window(model: Decoder, window: int, sinks: int = 0) -> Iterator[None]:
    """Make all layers of a model read only a window of keys, within the context."""
    layers: list[Any] = [block.get_submodule("self_attn") for block in model.layers]
    if not isinstance(layers[0], WINDOWED):
        raise ValueError(f"sliding windows are written for rope and forgetting, not for {model.config.mechanism}")
    if not 0 <= sinks < window:
        raise ValueError(f"of a window of {window:,} keys at least one is new, got {sinks:,} sinks")
    for layer in layers:
        layer.attend = lambda inputs, layer=layer: attend_window(layer, inputs, window, sinks)
    try:
        yield
    finally:
        for layer in layers:
            del layer.attend


def attend_window(layer: Any, inputs: AttentionInputs, window: int, sinks: int) -> Tensor:
    """Return the attention over the window, `[B, H, T, D]`, computed in blocks of rows."""
    batch, heads, length, width = inputs.query.shape
    group = heads // inputs.key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (inputs.key, inputs.value))
    total = layer.log_forget_sums(inputs) if isinstance(layer, ForgettingAttention) else None
    plain_query, plain_key, _ = layer.project_heads(inputs.x)
    index = torch.arange(length, device=key.device)
    sink_key = plain_key[:, :, :sinks].repeat_interleave(group, dim=1)
    if layer.rotary and sinks:
        (sink_key,) = rotate_by_position([sink_key], index[None, :sinks], layer.rope_theta)
    cells = MAX_CELLS.get(key.device.type, MAX_CELLS["cpu"])
    size = max(1, min(length, cells // (batch * heads * min(length, window + 512)), 512))
    found = []
    for rows in index.split(size):
        first, end = max(0, int(rows[0]) - (window - sinks) + 1), int(rows[-1]) + 1
        newest = index[first:end]
        logits = inputs.query[:, :, rows] @ key[:, :, newest].mT * width**-0.5
        if total is not None:
            logits = logits + (total[:, :, rows, None] - total[:, :, None, newest])
        is_older = newest <= rows[:, None] - (window - sinks)
        logits = logits.masked_fill(is_older | (newest > rows[:, None]), -torch.inf)
        values = value[:, :, newest]
        if sinks:
            query = plain_query[:, :, rows]
            if layer.rotary:
                (query,) = rotate_by_position([query], rows[None].clamp(max=window - 1), layer.rope_theta)
            to_sinks = query @ sink_key.mT * width**-0.5
            if total is not None:
                to_sinks = to_sinks + (total[:, :, rows, None] - total[:, :, None, :sinks])
            is_newest = index[:sinks] > rows[:, None] - (window - sinks)
            logits = torch.cat([to_sinks.masked_fill(is_newest, -torch.inf), logits], dim=-1)
            values = torch.cat([value[:, :, :sinks], values], dim=2)
        weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        found.append(weights.to(values.dtype) @ values)  # [B, H, R, K] @ [B, H, K, D]
    return torch.cat(found, dim=2)
