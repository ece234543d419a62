"""The static cache: what it holds is what a growing one holds, in buffers that never move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tra
from tra.attention import MECHANISMS, StaticCache
from tra.model import run_layers

STATIC = [name for name, mechanism in MECHANISMS.items() if mechanism.takes_key_lengths]
MECHANISM = pytest.mark.parametrize("mechanism", STATIC)
SIDE = pytest.mark.parametrize("side", ["left", "right", "middle", "scattered"])
VOCABULARY = 11
EXACT = {"rtol": 1e-12, "atol": 1e-12}
"""Of float64: sums of some hundred numbers near 1, in another order."""


def decoder(mechanism: str, **changes: object) -> tra.Decoder:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2} | changes
    model = tra.Decoder(tra.DecoderConfig(VOCABULARY, mechanism=mechanism, **sizes)).double().eval()
    torch.nn.init.normal_(model.embed_tokens.weight)  # scores large enough to matter
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], width: int, side: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Prompts of several lengths as one batch, its mask, and the prompts `[1, length]` alone."""
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.bool)
    prompts = [tokens(1, length, seed=row) for row, length in enumerate(lengths)]
    for row, prompt in enumerate(prompts):
        length = prompt.shape[1]
        where = {
            "left": torch.arange(width - length, width),
            "right": torch.arange(length),
            "middle": torch.cat([torch.arange(1), torch.arange(width - length + 1, width)]),
            "scattered": torch.randperm(width, generator=torch.Generator().manual_seed(row))[:length].sort().values,
        }[side]
        ids[row, where], mask[row, where] = prompt[0], True
    return ids, mask, prompts


def test_who_can_use_one() -> None:
    assert {"tra", "rope", "nope", "sinusoidal", "tra-threshold-only"} <= set(STATIC)
    for mechanism in set(MECHANISMS) - set(STATIC):
        with pytest.raises(ValueError, match=f"{mechanism} can't use a static cache"):
            decoder(mechanism).new_cache(8)


@MECHANISM
@pytest.mark.parametrize("chunks", [[1] * 24, [7, 1, 1, 15], [24], [23, 1]])
@torch.no_grad()
def test_pieces_are_the_whole(mechanism: str, chunks: list[int]) -> None:
    model, ids = decoder(mechanism), tokens(3, 24)
    cache = model.new_cache(capacity=29)
    read = torch.cat([model(piece, cache=cache) for piece in ids.split(chunks, dim=1)], 1)
    assert cache.length == 24
    torch.testing.assert_close(read, model(ids), **EXACT)


@MECHANISM
@SIDE
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 6], [12]])
@torch.no_grad()
def test_padding_changes_nothing(mechanism: str, side: str, chunks: list[int]) -> None:
    """Nor does what stands there: here NaN, which would poison whatever reads it."""
    model = decoder(mechanism)
    ids, mask, prompts = padded([12, 7, 3], 12, side)
    alone = [model(prompt)[0] for prompt in prompts]
    embedded = model.embed_tokens(ids).masked_fill(~mask[..., None], torch.nan)
    cache, read, end = model.new_cache(capacity=12), [], 0
    for piece in embedded.split(chunks, dim=1):
        end += piece.shape[1]
        read.append(model.lm_head(run_layers(piece, model.layers, model.norm, mask[:, :end], cache)))
    for row, expected in enumerate(alone):
        torch.testing.assert_close(torch.cat(read, 1)[row, mask[row]], expected, **EXACT)


@MECHANISM
@torch.no_grad()
def test_rows_of_several_lengths_go_on_without_a_mask(mechanism: str) -> None:
    model = decoder(mechanism)
    ids, mask, prompts = padded([5, 2], 5, "right")
    cache = model.new_cache(capacity=9)
    model(ids, mask, cache)
    more = tokens(2, 4, seed=9)
    read = torch.cat([model(token, cache=cache) for token in more[:, :2].split(1, dim=1)], 1)
    read = torch.cat([read, model(more[:, 2:], cache=cache)], 1)
    for row, prompt in enumerate(prompts):
        whole = model(torch.cat([prompt, more[row : row + 1]], 1))[0]
        torch.testing.assert_close(read[row], whole[-4:], **EXACT)


@torch.no_grad()
def test_buffers_stay_where_they_are() -> None:
    """And a step's shapes are always the same, whatever the length: what a CUDA graph needs."""
    model, ids = decoder("tra"), tokens(2, 8)
    cache = model.new_cache(capacity=10)
    assert isinstance(cache, StaticCache)
    model(ids[:, :5], cache=cache)
    assert cache.lengths is not None
    (layer, *_), lengths = cache.layers, cache.lengths
    assert layer._buffers is not None
    addresses, seen = [buffer.data_ptr() for buffer in layer._buffers], set()
    add = layer.add

    def record(*inputs: Tensor) -> object:
        view = add(*inputs)
        seen.add((view.key.shape, view.key.data_ptr()))
        return view

    layer.add = record  # type: ignore[method-assign,assignment]
    for token in ids[:, 5:].split(1, dim=1):
        model(token, cache=cache)
    assert len(seen) == 1
    assert [buffer.data_ptr() for buffer in layer._buffers] == addresses
    assert cache.lengths is lengths
    assert lengths.tolist() == [8, 8]
    for buffer in layer._buffers:
        assert bool((buffer[:, :, 8:10] == 0).all())
        assert bool((buffer[:, :, :8] != 0).any(-1).all())


@MECHANISM
@torch.no_grad()
def test_what_is_refused_leaves_it_as_it_was(mechanism: str) -> None:
    model, ids = decoder(mechanism), tokens(2, 9)
    cache = model.new_cache(capacity=9)
    model(ids[:, :8], cache=cache)
    with pytest.raises(ValueError, match="batch of 2, got one of 1"):
        model(ids[:1, 8:], cache=cache)
    with pytest.raises(ValueError, match=r"a static cache of 9 tokens can't take 2 more after 8"):
        model(ids[:, :2], cache=cache)
    with pytest.raises(ValueError, match=r"the cache holds torch.float64, got torch.float32"):
        model.float()(ids[:, 8:], cache=cache)
    with pytest.raises(ValueError, match=r"key_mask must be bool of shape \(2, 9\)"):
        model.double()(ids[:, 8:], torch.ones(2, 8, dtype=torch.bool), cache)
    assert cache.length == 8
    # its weights have been through float32
    torch.testing.assert_close(model(ids[:, 8:], cache=cache), model(ids)[:, 8:], rtol=1e-5, atol=1e-5)


def test_bad_ones() -> None:
    model = decoder("tra")
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        model.new_cache(0)
    with pytest.raises(ValueError, match=r"a static cache of 3 tokens can't take 4 more"):
        model(tokens(1, 4), cache=model.new_cache(3))
    with pytest.raises(RuntimeError, match="no_grad"):
        model(tokens(1, 3), cache=model.new_cache(3))
