"""Rivals' sliding windows against a plain form, a query at a time with a cache of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tra
from benchmarks import windowed_attention
from benchmarks.windowed_attention import sliding_window
from tra.attention.shared.rotation import rotate_by_position

LENGTH = 40


def decoder(mechanism: str, n_layers: int = 1) -> tra.Decoder:
    torch.manual_seed(0)
    config = tra.DecoderConfig(
        17, d_model=32, n_layers=n_layers, n_heads=4, n_kv_heads=2, mechanism=mechanism, embedding_init="normal"
    )
    return tra.Decoder(config).double().eval()


def plain(model: tra.Decoder, tokens: Tensor, window: int, sinks: int) -> Tensor:
    """Return what one layer's queries read: each has the first tokens and the newest, numbered as in its cache."""
    ((layer, x),) = model.attention_inputs(tokens)
    query, key, value = layer.project_heads(x)
    total = layer.gate(x).cumsum(-1) if hasattr(layer, "gate") else torch.zeros(1, 4, LENGTH).double()
    found = []
    for row in range(LENGTH):
        kept = torch.arange(row + 1)
        if len(kept) > window:
            kept = torch.cat([kept[:sinks], kept[len(kept) - (window - sinks) :]])
        q, k = query[:, :, row : row + 1], key[:, :, kept]
        if layer.rotary:
            place = torch.arange(len(kept))[None]
            (q,), (k,) = (rotate_by_position([y], at, layer.rope_theta) for y, at in ((q, place[:, -1:]), (k, place)))
        logits = q @ k.repeat_interleave(2, dim=1).mT * 8**-0.5
        logits = logits + (total[:, :, row, None, None] - total[:, :, None, kept])
        found.append(logits.softmax(-1) @ value[:, :, kept].repeat_interleave(2, dim=1))
    return torch.cat(found, dim=2)


@pytest.mark.parametrize("mechanism", ["rope", "forgetting"])
@pytest.mark.parametrize(("window", "sinks"), [(8, 0), (8, 3), (1, 0), (64, 4)])
def test_against_a_cache_by_query(mechanism: str, window: int, sinks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowed_attention, "MAX_CELLS", {"cpu": 4 * 7 * LENGTH})  # several blocks of queries
    model, tokens = decoder(mechanism), torch.randint(17, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = plain(model, tokens, window, sinks)
    with torch.no_grad(), sliding_window(model, window, sinks):
        layer = model.layers[0].get_submodule("self_attn")
        ((_, x),) = model.attention_inputs(tokens)
        found = layer.attend(layer.prepare_inputs(x))  # type: ignore[operator]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mechanism", ["rope", "forgetting"])
def test_a_window_of_everything_is_the_model(mechanism: str) -> None:
    model, tokens = decoder(mechanism, 2), torch.randint(17, (1, LENGTH))
    whole = model(tokens)
    for sinks in (0, 4):
        with sliding_window(model, LENGTH, sinks):
            torch.testing.assert_close(model(tokens), whole)
        with sliding_window(model, 8, sinks):
            assert not torch.allclose(model(tokens), whole)
    torch.testing.assert_close(model(tokens), whole, rtol=0, atol=0)  # and nothing stays of it


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="for rope and forgetting, not for tra"), sliding_window(decoder("tra"), 8):
        pass
    for window, sinks in ((0, 0), (4, 4), (4, -1)):
        with pytest.raises(ValueError, match="at least one is new"), sliding_window(decoder("rope"), window, sinks):
            pass
