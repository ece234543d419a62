"""Generation in bounded memory says what our own does with the same windows, far beyond the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tra
from tests.hub.models import padded, tokens
from tests.hub.test_generation import sharp
from tests.slow import slow
from tra.hub import TRABoundedCache, TRAForCausalLM

WINDOWS = (5, 9)
NEW = 90
"""More than windows and pages together hold, so that tokens are written over."""


def decoder_of(model: TRAForCausalLM) -> tra.Decoder:
    decoder = tra.Decoder(model.config.to_decoder()).double().eval()
    decoder.load_state_dict({name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()})
    return decoder


def bounded(model: TRAForCausalLM, **options: Any) -> TRABoundedCache:
    return TRABoundedCache(model.config, WINDOWS, **options)


@pytest.mark.parametrize("mechanism", ["tra", *slow("rope")])
def test_text_is_that_of_our_own_generate(mechanism: str) -> None:
    model, ids = sharp(mechanism), tokens(2, 150)
    ours = decoder_of(model).generate(ids, NEW, cache=tra.BoundedCache(2, WINDOWS, chunk=16))
    for chunk in (16, 64):  # a prompt of 150 tokens is read in pieces
        cache = bounded(model, chunk=chunk)
        theirs = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(theirs[:, ids.shape[1] :], ours)
        assert cache.get_seq_length() == 150 + NEW - 1
        assert cache.bounded.memory_bytes < 2**18
    unbounded = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert not torch.equal(unbounded[:, ids.shape[1] :], ours)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", *slow("right", "middle")])
def test_padding_changes_nothing(side: str) -> None:
    model = sharp()
    rows, ids, mask = padded([40, 23, 3], side)
    together = model(ids, mask, past_key_values=bounded(model, chunk=8)).logits
    for row, one in enumerate(rows):
        alone = model(one, past_key_values=bounded(model, chunk=64)).logits[0]
        torch.testing.assert_close(together[row][mask[row].bool()], alone)


def test_heads_have_windows_of_their_own() -> None:
    model, ids = sharp(), tokens(2, 150)
    n_heads = model.config.num_attention_heads
    windows = [[5] * (n_heads // 2) + [100] * (n_heads // 2), [9] * n_heads]
    ours = decoder_of(model).generate(ids, NEW, cache=tra.BoundedCache(2, windows, chunk=16))
    cache = TRABoundedCache(model.config, windows, chunk=16)
    theirs = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(theirs[:, ids.shape[1] :], ours)
    by_layer = TRABoundedCache(model.config, [100, 9], chunk=16)
    model.generate(ids, past_key_values=by_layer, max_new_tokens=1, do_sample=False)
    assert cache.bounded.memory_bytes < by_layer.bounded.memory_bytes


def test_steps_are_one_pass() -> None:
    model, ids = sharp(), tokens(2, 100)
    with torch.no_grad():
        whole = model(ids, past_key_values=bounded(model, chunk=128)).logits
        for pieces in ([1, 1, 98], [70, 7, 1, 22]):
            cache = bounded(model, chunk=32)
            found = [model(piece, past_key_values=cache).logits for piece in ids.split(pieces, dim=1)]
            torch.testing.assert_close(torch.cat(found, dim=1), whole)
        assert not torch.allclose(whole, model(ids).logits)


def test_rows_can_be_chosen_and_a_cache_used_again() -> None:
    model, ids = sharp(), tokens(3, 80)
    order = torch.tensor([2, 0, 0])
    cache, expected = bounded(model), bounded(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[order], past_key_values=expected)
        cache.reorder_cache(order)
        step = tokens(3, 1, seed=5)
        torch.testing.assert_close(
            model(step, past_key_values=cache).logits, model(step, past_key_values=expected).logits
        )
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)
        assert model(step[:2], past_key_values=cache).logits.shape[0] == 2
        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(
            model(ids, past_key_values=cache).logits, model(ids, past_key_values=bounded(model)).logits
        )


def test_a_text_goes_on_with_the_same_cache() -> None:
    model, ids = sharp(), tokens(1, 30)
    once = model.generate(ids, past_key_values=bounded(model), max_new_tokens=10, do_sample=False)
    cache = bounded(model)
    begun = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(begun, past_key_values=cache, max_new_tokens=5, do_sample=False), once)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "prefill_chunk_size": 7}
    assert torch.equal(model.generate(ids, past_key_values=bounded(model), **options), once)


def test_beams() -> None:
    """With windows that hold all, beams are those of a growing cache."""
    model, ids = sharp(), tokens(2, 12)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 20, "do_sample": False}
    grown = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    cache = TRABoundedCache(model.config, 64)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), grown)


def test_the_guard_counts() -> None:
    model = sharp()
    cache = bounded(model, guard=0.5)
    model.generate(tokens(1, 20), past_key_values=cache, max_new_tokens=30, do_sample=False)
    for layer, window in zip(cache.bounded.unmet_windows(), WINDOWS, strict=True):
        assert layer["window"] == window
        assert 0 < layer["queries"] <= 31


def test_what_is_refused() -> None:
    model, ids = sharp(), tokens(1, 300)
    with pytest.raises(ValueError, match="forgetting can't use a bounded cache: it is for TRA and rope"):
        TRABoundedCache(sharp("forgetting").config, 8)
    with pytest.raises(ValueError, match="windows must be at least 1, got 0"):
        TRABoundedCache(model.config, 0)
    with pytest.raises(ValueError, match="one for each of 2 layers"):
        TRABoundedCache(model.config, (4, 4, 4))
    with pytest.raises(ValueError, match="output_attentions doesn't go with a bounded cache"):
        model(ids[:, :4], past_key_values=bounded(model), output_attentions=True)
    with pytest.raises(ValueError, match="output_hidden_states doesn't go with a prompt longer than"):
        model(ids, past_key_values=bounded(model, chunk=8), output_hidden_states=True)
    with pytest.raises(ValueError, match="can't be cropped"):
        model.generate(ids, past_key_values=bounded(model), prompt_lookup_num_tokens=3, max_new_tokens=5)
    with pytest.raises(ValueError, match="for models of TRA"):
        bounded(model).update(ids, ids, 0)
    with pytest.raises(ValueError, match=r"attention_mask must be \[1, 8\]"):
        model(ids[:, :8], attention_mask=ids[:, :4] > 0, past_key_values=bounded(model))
