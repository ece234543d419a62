"""Text is the same with every cache, in every mode that transformers has for choosing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

import tra
from tests.hub.models import CACHED, CROPPED, SOME_MECHANISMS, STATIC, VOCABULARY, language_model, padded, tokens
from tra.attention import MECHANISMS
from tra.hub import TRAForCausalLM

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "penalty": {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}
NEW = 9


def generate(model: TRAForCausalLM, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)


def sharp(mechanism: str = "tra", **changes: Any) -> TRAForCausalLM:
    """A model whose choices are not ties: its logits lie apart."""
    model = language_model(mechanism, **changes)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(100)
        model.lm_head.weight.mul_(50)
    return model


@SOME_MECHANISMS
@pytest.mark.parametrize("mode", list(MODES))
def test_the_cache_changes_nothing(mechanism: str, mode: str) -> None:
    model = sharp(mechanism)
    _, ids, mask = padded([9, 6, 2], "left")
    plain = generate(model, ids, mask, use_cache=False, **MODES[mode])
    assert torch.equal(generate(model, ids, mask, **MODES[mode]), plain)
    assert len(plain.unique()) > 2
    if mechanism in STATIC:
        assert torch.equal(generate(model, ids, mask, cache_implementation="static", **MODES[mode]), plain)


@pytest.mark.parametrize("mechanism", list(MECHANISMS))
def test_a_batch_is_its_rows(mechanism: str) -> None:
    """And these are the decoder's, which pads as it likes."""
    model = sharp(mechanism)
    rows, ids, mask = padded([9, 6, 2], "left")
    together = generate(model, ids, mask, do_sample=False)[:, 9:]
    decoder = tra.Decoder(model.config.to_decoder()).double().eval()
    decoder.load_state_dict({name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()})
    ours = decoder.generate(ids, NEW, key_mask=mask.bool())
    assert torch.equal(together, ours)
    for row, text in zip(rows, together, strict=True):
        assert generate(model, row, do_sample=False)[0, row.shape[1] :].tolist() == text.tolist()


@pytest.mark.parametrize("mechanism", STATIC)
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_static_steps_are_the_full_pass(mechanism: str, side: str) -> None:
    """Whatever the pieces, with holes in the mask, and when the cache is used again."""
    model = sharp(mechanism)
    _, ids, mask = padded([12, 7, 3], side)
    real = mask.bool()
    cache = StaticCache(model.config, max_cache_len=15)
    with torch.no_grad():
        whole = model(ids, mask).logits
        for chunks in ([12], [5, 1, 6], [1] * 12):
            found, end = [], 0
            for piece in ids.split(chunks, dim=1):
                end += piece.shape[1]
                found.append(model(piece, mask[:, :end], cache).logits)
            torch.testing.assert_close(torch.cat(found, 1)[real], whole[real])
            cache.reset()
        unmasked = [model(piece, past_key_values=cache).logits for piece in ids.split([5, 7], dim=1)]
        torch.testing.assert_close(torch.cat(unmasked, 1), model(ids).logits)


@pytest.mark.parametrize("mechanism", CACHED)
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_growing_steps_are_the_full_pass(mechanism: str, side: str) -> None:
    model = sharp(mechanism)
    _, ids, mask = padded([12, 7, 3], side)
    with torch.no_grad():
        whole = model(ids, mask).logits[mask.bool()]
        for cache in (DynamicCache(), DynamicCache(config=model.config)):
            found, end = [], 0
            for piece in ids.split([5, 1, 6], dim=1):
                end += piece.shape[1]
                out = model(piece, mask[:, :end], cache)
                assert out.past_key_values is cache
                assert cache.get_seq_length() == end
                found.append(out.logits)
            torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], whole)


def test_gradients_flow_through_a_growing_cache() -> None:
    model, ids = sharp(), tokens(2, 8)
    cache = DynamicCache()
    logits = torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split([5, 3], dim=1)], dim=1)
    logits.square().sum().backward()
    pieces = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(ids).logits.square().sum().backward()
    torch.testing.assert_close(pieces, {name: parameter.grad for name, parameter in model.named_parameters()})


def test_text_goes_on_where_it_ended() -> None:
    model, ids = sharp(), tokens(1, 6)
    whole = generate(model, ids, do_sample=False)
    cache = DynamicCache()
    first = model.generate(ids, max_new_tokens=4, do_sample=False, past_key_values=cache)
    second = model.generate(first, max_new_tokens=NEW - 4, do_sample=False, past_key_values=cache)
    assert torch.equal(second, whole)


@pytest.mark.parametrize("how", ["model", "lookup", "chunked", "embeddings"])
def test_ways_to_the_same_text(how: str) -> None:
    model, ids = sharp(), tokens(1, 12)
    plain = generate(model, ids, do_sample=False)
    if how == "embeddings":
        embedded = model.get_input_embeddings()(ids)
        found = model.generate(inputs_embeds=embedded, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(found, plain[:, 12:])
        return
    options: dict[str, Any] = {
        "model": {"assistant_model": sharp("rope")},
        "lookup": {"prompt_lookup_num_tokens": 3},
        "chunked": {"prefill_chunk_size": 5},
    }[how]
    assert torch.equal(generate(model, ids, do_sample=False, **options), plain)


def test_ending_and_what_is_never_said() -> None:
    model, ids = sharp(), tokens(3, 6)
    plain = generate(model, ids, do_sample=False)
    end = int(plain[0, 8])
    said = 6 + plain[0, 6:].tolist().index(end) + 1
    stopped = generate(model, ids, do_sample=False, eos_token_id=end, pad_token_id=0)[0].tolist()
    assert stopped[:said] == plain[0, :said].tolist()
    assert set(stopped[said:]) <= {0}
    others = [token for token in range(VOCABULARY) if token not in (3, 4)]
    assert set(generate(model, ids, do_sample=True, suppress_tokens=others)[:, 6:].flatten().tolist()) <= {3, 4}


@pytest.mark.parametrize("mechanism", CROPPED)
def test_an_assistant_changes_no_text(mechanism: str) -> None:
    """Tokens that it got wrong are taken out of the cache again."""
    model, ids = sharp(mechanism), tokens(1, 6)
    plain = generate(model, ids, do_sample=False)
    assert torch.equal(generate(model, ids, do_sample=False, assistant_model=sharp("nope")), plain)


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name not in CROPPED])
def test_an_assistant_is_for_caches_that_can_be_cropped(mechanism: str) -> None:
    with pytest.raises(ValueError, match="not supported with stateful models"):
        generate(sharp(mechanism), tokens(1, 6), assistant_model=sharp())


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["forgetting", "selective", "lstm"])
def test_a_cache_of_another_mechanism_is_refused(mechanism: str) -> None:
    ids = tokens(1, 5)
    cache = language_model()(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="filled by another mechanism"):
        language_model(mechanism)(ids, past_key_values=cache)


def test_a_static_cache_gives_no_maps() -> None:
    model = language_model()
    cache = StaticCache(model.config, max_cache_len=7)
    with torch.no_grad(), pytest.raises(ValueError, match="output_attentions doesn't go with a static cache"):
        model(tokens(1, 5), past_key_values=cache, output_attentions=True)


@torch.no_grad()
def test_bad_caches_get_one_clear_line() -> None:
    model, ids = language_model(), tokens(2, 5)
    full = StaticCache(model.config, max_cache_len=7)
    model(ids, past_key_values=full)
    held = DynamicCache()
    model(ids, past_key_values=held)
    for call, message in (
        (lambda: model(ids, past_key_values=full), "a static cache of 7 tokens can't take 5 more after 5"),
        (lambda: model(ids, past_key_values=held, attention_mask=torch.ones(2, 5)), r"must be \[2, 10\].*got \(2, 5\)"),
        (lambda: model(ids[:, :2], torch.ones(2, 8), full), r"must be \[2, 2 to 7\] .*got \(2, 8\)"),
        (
            lambda: language_model("cope")(ids, past_key_values=StaticCache(model.config, max_cache_len=9)),
            "cope can't use a static cache",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    torch.testing.assert_close(
        model(ids[:, :2], past_key_values=full).logits, model(torch.cat([ids, ids[:, :2]], 1)).logits[:, 5:]
    )


def test_a_static_cache_is_for_inference() -> None:
    model = language_model()
    with pytest.raises(RuntimeError, match="no_grad"):
        model(tokens(1, 3), past_key_values=StaticCache(model.config, max_cache_len=7))


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["tra", "rope"])
def test_static_steps_compile_once(mechanism: str) -> None:
    """As `generate` does on a GPU: the step is one graph, whose shapes never change."""
    torch._dynamo.reset()
    model = sharp(mechanism).float()
    _, ids, mask = padded([9, 6], "left")
    plain = generate(model, ids, mask, do_sample=False, use_cache=False)
    options = CompileConfig(fullgraph=True, mode="default")
    options._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    found = generate(model, ids, mask, do_sample=False, cache_implementation="static", compile_config=options)
    assert torch.equal(found, plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", STATIC)
def test_static_steps_on_a_gpu(mechanism: str) -> None:
    """There `generate` compiles the step by itself, and replays it as a CUDA graph."""
    model = sharp(mechanism).float().cuda()
    _, ids, mask = (part if isinstance(part, list) else part.cuda() for part in padded([9, 6], "left"))
    plain = generate(model, ids, mask, do_sample=False, use_cache=False)
    for _ in range(2):
        assert torch.equal(generate(model, ids, mask, do_sample=False, cache_implementation="static"), plain)
