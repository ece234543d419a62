"""Few queries over many keys in plain PyTorch: the newest keys first, and older ones only while they can matter.

A map of the newest keys is computed, then larger ones, until the bound of `stop_bound.py` allows to stop. The check
reads its result on the host, so this form is for a CPU, and it needs a promised `score_bound`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tra.ops.full_map import AttentionMap, full_attention_map, weigh_values
from tra.ops.options import AttentionOptions
from tra.ops.stop_bound import log_remaining_weight
from tra.ops.visible import Visible

FIRST_MAP_KEYS = 256
MAP_GROWTH = 8
"""Each further map has this many times the keys, so that maps which are thrown away are small beside it."""


def newest_first_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    visible: Visible,
    options: AttentionOptions,
    seed: None = None,
) -> Tensor:
    """Return the reference's result up to rounding and `tolerance`.

    Neither keys that can't matter nor free slots of a cache are read.
    """
    end = min(key.shape[2], max(1, int(visible.last.max()) + 1))

    def read(start: int) -> tuple[Tensor, Tensor]:
        return key[:, :, start:end], value[:, :, start:end]

    return attend_newest_first(query, read, end, log_forget, visible, options)


def attend_newest_first(
    query: Tensor,
    read: Callable[[int], tuple[Tensor, Tensor]],
    end: int,
    log_forget: Tensor,
    visible: Visible,
    options: AttentionOptions,
    unit: int = 1,
) -> Tensor:
    """Return the attention to keys `0..end-1`.

    Args:
        read: Returns the keys and values from `start` on.
        unit: Every `start` is a multiple of it.
    """
    first, last, key_mask = visible
    keys = FIRST_MAP_KEYS
    while True:
        start = max(0, end - keys) // unit * unit
        key, value = read(start)
        mask = None if key_mask is None else key_mask[:, start:end]
        near = Visible((first - start).clamp(min=0), last - start, mask)
        part = full_attention_map(query, key, log_forget, near, options)
        keys_left = (start - first).clamp(min=0)[:, None]
        if start == 0 or bool(rows_done(part, log_forget, keys_left, options).all()):
            return weigh_values(part.weights, value, mask, query.dtype)
        keys *= MAP_GROWTH


def rows_done(part: AttentionMap, log_forget: Tensor, keys_left: Tensor, options: AttentionOptions) -> Tensor:
    """Return the rows, `[B, H, Tq]` bool, in which all keys older than the map weigh less than the tolerance.

    Args:
        keys_left: `[B, 1, Tq]`: the number of these keys.
    """
    assert options.score_bound is not None
    largest_score = torch.full_like(log_forget, options.score_bound)
    count = part.counted.sum(-1).to(log_forget.dtype)
    remaining = log_remaining_weight(
        log_forget,
        count,
        keys_left.to(log_forget.dtype).expand_as(log_forget),
        largest_score,
        options.threshold if options.has_margin else None,
    )
    found = part.logits(log_forget).logsumexp(-1)
    return (remaining < found + math.log(options.tolerance)) | (keys_left == 0)  # a NaN is not done
