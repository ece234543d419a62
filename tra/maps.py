"""Attention maps of a window, small enough to keep: what a figure needs of a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tra.attention import MECHANISMS
from tra.diagnose import exact_products
from tra.model import Decoder
from tra.run import RunFolder, write_arrays
from tra.text.task import Stream

WINDOW = 256
"""Tokens of a map."""

LEVELS = 63
"""Steps between no weight and all of it: enough for the eye, and few enough to compress well."""


@torch.no_grad()
def attention_maps(model: Decoder, tokens: Tensor) -> npt.NDArray[np.uint8]:
    """Weights of every layer and head over a window `[1, T]` -> `[L, H, T, T]`, a byte each.

    0 is a key that is not seen or was dropped; 1 … 64 stand for 0 … 1, by the square root, so that small weights show.
    Negative weights, which differential attention has, count as 0.
    """
    if MECHANISMS[model.config.mechanism].replaces_mlp:
        raise ValueError(f"{model.config.mechanism} has no attention to map")
    model.eval()
    with exact_products():
        found = []
        for layer, x in model.attention_inputs(tokens):
            seen = layer.attention_map(x)
            steps = 1 + (LEVELS * seen.weights.clamp(0, 1).sqrt()).round()
            found.append(torch.where(seen.logits > -torch.inf, steps, 0)[0].to(torch.uint8).cpu().numpy())
    return np.stack(found)


def write_maps(run: RunFolder, model: Decoder, stream: Stream, windows: int, device: torch.device) -> None:
    """Maps of some windows, spread over a text, to maps-<text>.npz: `tokens` `[N, T]`, `maps` `[N, L, H, T, T]`."""
    if windows < 1:
        raise ValueError(f"maps are of at least 1 window, got {windows}")
    size = min(WINDOW, len(stream.tokens) - 1)
    starts = np.linspace(0, len(stream.tokens) - size, windows + 2).astype(int)[1:-1]
    tokens = np.stack([stream.tokens[start : start + size] for start in starts]).astype(np.int64)
    maps = [attention_maps(model, torch.from_numpy(row)[None].to(device)) for row in tokens]
    arrays = {"tokens": tokens.astype(np.int32), "starts": starts, "maps": np.stack(maps)}
    write_arrays(run.path / f"maps-{stream.name}.npz", arrays)


def weights_of(maps: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """What `attention_maps` kept, as weights; NaN where a key was not seen or dropped."""
    weights = np.square((maps.astype(np.float32) - 1) / LEVELS)
    return np.where(maps == 0, np.float32(np.nan), weights)
