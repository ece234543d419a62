"""Small models of transformers, in double precision, and inputs for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tra
from tests.slow import slow
from tra.attention import MECHANISMS
from tra.hub import TRAConfig, TRAForCausalLM

VOCABULARY = 31
CACHED = list(MECHANISMS)
CROPPED = [name for name, mechanism in MECHANISMS.items() if not mechanism.keeps_state]
STATIC = [name for name, mechanism in MECHANISMS.items() if mechanism.takes_key_lengths]
QUICK = ("tra", "rope", "lstm")
OTHERS = [name for name in MECHANISMS if name not in QUICK]
SOME_MECHANISMS = pytest.mark.parametrize("mechanism", [*QUICK, *slow(*OTHERS)])


def decoder_config(mechanism: str = "tra", **changes: Any) -> tra.DecoderConfig:
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2} | changes
    return tra.DecoderConfig(VOCABULARY, mechanism=mechanism, **sizes)


def config(mechanism: str = "tra", **changes: Any) -> TRAConfig:
    """`changes` to either part, as they are called in transformers."""
    values = TRAConfig.from_decoder(decoder_config(mechanism)).to_dict()
    return TRAConfig.from_dict(values | changes)


def language_model(mechanism: str = "tra", **changes: Any) -> TRAForCausalLM:
    torch.manual_seed(0)
    return TRAForCausalLM(config(mechanism, **changes)).double().eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows `[1, length]`, and the same as a batch with its mask."""
    rows = [tokens(1, length, seed=length) for length in lengths]
    width = max(lengths)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        where = {
            "left": torch.arange(width - row.shape[1], width),
            "right": torch.arange(row.shape[1]),
            "middle": torch.cat([torch.arange(2), torch.arange(width - row.shape[1] + 2, width)]),
        }[side]
        ids[index, where], mask[index, where] = row[0], 1
    return rows, ids, mask
