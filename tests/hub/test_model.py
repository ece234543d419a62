"""What transformers checks of every causal language model, in our words."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import tra
from tests.hub.models import VOCABULARY, config, decoder_config, language_model, padded, tokens
from tra.attention import MECHANISMS
from tra.hub import TRAForCausalLM, TRAModel

MECHANISM = pytest.mark.parametrize("mechanism", list(MECHANISMS))


@MECHANISM
@pytest.mark.parametrize("use_cache", [None, False])
def test_logits_are_the_decoder_s_to_the_bit(mechanism: str, use_cache: bool | None) -> None:
    torch.manual_seed(0)
    decoder = tra.Decoder(decoder_config(mechanism, block="authors")).eval()
    model = TRAForCausalLM.from_decoder(decoder)
    with torch.no_grad():
        out = model(tokens(3, 40), use_cache=use_cache)
        assert torch.equal(out.logits, decoder(tokens(3, 40)))
    assert (out.past_key_values is None) == (use_cache is False)


@MECHANISM
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_changes_nothing(mechanism: str, side: str) -> None:
    model = language_model(mechanism)
    rows, ids, mask = padded([12, 7, 3], side)
    with torch.no_grad():
        together = model(ids, mask).logits
        for index, row in enumerate(rows):
            torch.testing.assert_close(together[index, mask[index].bool()], model(row).logits[0])
            torch.testing.assert_close(model(row, torch.ones_like(row)).logits, model(row).logits, rtol=0, atol=0)


def test_embeddings_in_the_place_of_ids() -> None:
    model, ids = language_model(), tokens(2, 9)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(ids).logits)


@pytest.mark.parametrize("mechanism", ["tra", "sinusoidal", "lstm"])
def test_hidden_states(mechanism: str) -> None:
    model, ids = language_model(mechanism), tokens(2, 9)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    last = model.model(ids).last_hidden_state
    assert torch.equal(out.hidden_states[-1], last)
    assert torch.equal(model.lm_head(last), out.logits)
    between = model.model.layers[0](out.hidden_states[0], None, None, None)
    torch.testing.assert_close(out.hidden_states[1], between)
    if mechanism != "sinusoidal":  # which marks its input
        assert torch.equal(out.hidden_states[0], model.get_input_embeddings()(ids))
    assert model(ids).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 3


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name not in ("lstm", "differential")])
def test_attentions_are_what_values_are_weighed_with(mechanism: str) -> None:
    model = language_model(mechanism)
    _, ids, mask = padded([12, 7], "left")
    out = model(ids, mask, output_attentions=True, output_hidden_states=True)
    assert out.past_key_values is None
    assert len(out.attentions) == 2
    real = mask[:, None].bool().expand(-1, 4, -1)
    for index, weights in enumerate(out.attentions):
        assert weights.shape == (2, 4, 12, 12)
        assert float(weights.triu(1).abs().max()) == 0
        sums = weights.sum(-1)[real]
        assert bool(((sums - 1).abs() < 1e-12).logical_or(sums == 0).all())
        block = model.model.layers[index]
        x = block.input_layernorm(out.hidden_states[index])
        value = block.self_attn.project_heads(x)[2].repeat_interleave(2, dim=1)
        read = block.self_attn.o_proj((weights @ value).transpose(1, 2).flatten(2))
        where = mask.bool()
        torch.testing.assert_close(block.self_attn(x, where)[where], read[where])


def test_loss_is_masked_cross_entropy_shifted() -> None:
    model, ids = language_model().float(), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4], labels[1, -1] = -100, -100
    out = model(ids, labels=labels)
    targets = labels[:, 1:]
    expected = F.cross_entropy(model(ids).logits[:, :-1][targets != -100], targets[targets != -100])
    torch.testing.assert_close(out.loss, expected)
    count = torch.tensor(20)
    torch.testing.assert_close(
        model(ids, labels=labels, num_items_in_batch=count).loss, expected * (targets != -100).sum() / 20
    )


def test_logits_to_keep() -> None:
    model, ids = language_model(), tokens(2, 9)
    whole = model(ids).logits
    places, by_row, mask = torch.tensor([0, 5]), torch.tensor([[0, 5], [8, 3]]), ids > 15
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:])
    torch.testing.assert_close(model(ids, logits_to_keep=places).logits, whole[:, places])
    torch.testing.assert_close(
        model(ids, logits_to_keep=by_row).logits, torch.stack([whole[0, by_row[0]], whole[1, by_row[1]]])
    )
    torch.testing.assert_close(model(ids, logits_to_keep=mask).logits, whole[mask])


def test_tuples_on_request() -> None:
    model, ids = language_model(), tokens(2, 9)
    out = model(ids, labels=ids, use_cache=False, return_dict=False)
    assert isinstance(out, tuple)
    assert [part.ndim for part in out] == [0, 3]
    (hidden,) = model.model(ids, use_cache=False, return_dict=False)
    assert hidden.shape == (2, 9, 32)


@pytest.mark.parametrize("tied", [False, True])
def test_resize(tied: bool) -> None:
    model, ids = language_model(tie_word_embeddings=tied), tokens(2, 9)
    before = model(ids).logits
    model.resize_token_embeddings(VOCABULARY + 5)
    assert model.config.vocab_size == model.lm_head.out_features == VOCABULARY + 5
    torch.testing.assert_close(model(ids).logits[..., :VOCABULARY], before)
    assert model(ids + 5).logits.shape == (2, 9, VOCABULARY + 5)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.resize_token_embeddings(7)
    with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.6"):
        model(ids)
    fresh = language_model(tie_word_embeddings=tied)
    fresh.resize_token_embeddings(5000, mean_resizing=False)
    new = fresh.get_input_embeddings().weight[VOCABULARY:].detach()
    assert float(new.abs().max()) <= 0.01  # as a decoder starts
    if not tied:
        head = fresh.lm_head.weight[VOCABULARY:].detach()
        assert abs(float(head.std()) / 0.02 - 1) < 5 / math.sqrt(2 * head.numel())


def test_a_tied_head_is_the_embedding() -> None:
    model, ids = language_model(tie_word_embeddings=True), tokens(2, 9)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    model(ids, labels=ids).loss.backward()
    assert "lm_head.weight" not in dict(model.named_parameters())
    untied = language_model()
    assert untied.lm_head.weight is not untied.get_input_embeddings().weight
    with pytest.raises(ValueError, match="head of its own"):
        TRAForCausalLM.from_decoder(tra.Decoder(decoder_config()), tie_word_embeddings=True)


@MECHANISM
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(mechanism: str, reentrant: bool) -> None:
    """With dropout, whose draws are the same when blocks are gone through again."""
    ids, found = tokens(2, 12), []
    for checkpointing in (False, True):
        model = language_model(mechanism, dropout=0.2).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        calls: list[int] = []
        model.model.layers[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(1)
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert len(calls) == 1 + checkpointing
        found.append((loss, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (plain, gradients), (loss, again) = found
    assert torch.equal(plain, loss)
    torch.testing.assert_close(again, gradients)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@MECHANISM
@pytest.mark.parametrize("source", ["from_config", "from_pretrained"])
def test_weights_start_as_a_decoder_s(mechanism: str, source: str, tmp_path: Path) -> None:
    """Every tensor has the decoder's distribution, by Kolmogorov and Smirnov; one that is there keeps its value."""
    torch.manual_seed(0)
    wanted = config(mechanism, gate_bias=2.5, vocab_size=300, hidden_size=64)
    kept = "model.norm.weight"
    if source == "from_config":
        model = AutoModelForCausalLM.from_config(wanted)
    else:
        wanted.save_pretrained(tmp_path)
        save_file({kept: torch.full((64,), 1.5)}, tmp_path / "model.safetensors", {"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert model.get_parameter(kept).tolist() == [1.5] * 64
    decoder = tra.Decoder(wanted.to_decoder())
    ours = dict(decoder.named_parameters()) | dict(decoder.named_buffers())
    theirs = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in ours.items():
        theirs_name = "lm_head.weight" if name == "lm_head.weight" else f"model.{name}"
        found = theirs.pop(theirs_name)
        if theirs_name != kept:
            difference, allowed = kolmogorov_smirnov(found.detach().flatten(), tensor.detach().flatten())
            assert difference <= allowed, name
    assert not theirs


def kolmogorov_smirnov(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The largest difference of two samples' distributions, and what chance exceeds once in a million."""
    at = torch.cat([one, other])
    shares = [torch.searchsorted(x.sort().values, at, right=True) / len(x) for x in (one, other)]
    allowed = math.sqrt(math.log(2e6) / 2 * (1 / len(one) + 1 / len(other)))
    return float((shares[0] - shares[1]).abs().max()), allowed


def test_only_what_is_missing_starts_anew(tmp_path: Path) -> None:
    model = language_model(gate_bias=2.5).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.75)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    missing = {name for name in tensors if name.endswith("gate.linear.bias")}
    save_file({n: t for n, t in tensors.items() if n not in missing}, tmp_path / "model.safetensors", {"format": "pt"})
    for name, parameter in TRAForCausalLM.from_pretrained(tmp_path).named_parameters():
        assert set(parameter.detach().flatten().tolist()) == {2.5 if name in missing else 0.75}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loads_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    decoder = tra.Decoder(decoder_config()).eval()
    TRAForCausalLM.from_decoder(decoder).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    with torch.no_grad():
        assert torch.equal(model(tokens(2, 9)).logits, decoder.to(dtype)(tokens(2, 9)))
    model.save_pretrained(tmp_path / "half")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == dtype


def test_no_cache_is_made_in_training() -> None:
    model, ids = language_model(), tokens(2, 5)
    assert model.train()(ids).past_key_values is None
    assert isinstance(model(ids, use_cache=True).past_key_values, DynamicCache)
    model.gradient_checkpointing_enable()
    out = model(ids, labels=ids, use_cache=True)
    out.loss.backward()
    assert out.past_key_values.get_seq_length() == 5


def test_what_it_can_is_said_truly() -> None:
    assert not TRAModel._supports_sdpa
    assert language_model().config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="does not support an attention implementation through"):
        TRAForCausalLM(config(attn_implementation="sdpa"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": tokens(1, 4), "inputs_embeds": torch.zeros(1, 4, 32)}, "either input_ids or inputs_embeds"),
        ({"input_ids": tokens(1, 4) + 50}, r"token ids must lie in 0\.\.30"),
        ({"input_ids": tokens(1, 4), "attention_mask": torch.ones(1, 3)}, r"must be \[1, 4\] .*got \(1, 3\)"),
        (
            {"input_ids": tokens(1, 4), "attention_mask": torch.ones(1, 1, 4, 4)},
            r"must be \[1, 4\] .*got \(1, 1, 4, 4\)",
        ),
        (
            {"input_ids": tokens(1, 4), "position_ids": torch.arange(3)[None]},
            r"position_ids must be \[1 or 1, 4\], got",
        ),
        ({"input_ids": tokens(1, 4), "position_ids": torch.arange(4)[None] * 2}, "position_ids must count 0, 1, 2"),
        ({"input_ids": tokens(1, 4), "cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q need position_ids"),
        ({"input_ids": tokens(1, 4), "atention_mask": torch.ones(1, 4)}, "unexpected arguments: atention_mask"),
        ({"input_ids": tokens(1, 4), "labels": tokens(1, 3)}, r"labels must be \(1, 4\)"),
        ({"input_ids": tokens(1, 4), "past_key_values": ()}, "must be a Cache of transformers, got a tuple"),
        ({"input_ids": tokens(1, 4097), "output_attentions": True}, "up to 4,096 tokens, got 4,097"),
    ],
)
def test_bad_calls_get_one_clear_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        language_model().float()(**arguments)
    assert "\n" not in str(found.value)


def test_what_any_model_is_handed_is_no_mistake() -> None:
    """`generate` hands on the tokenizer of stop_strings, tokenizers their token types."""
    model, ids = language_model().float(), tokens(1, 4)
    others = {"tokenizer": object(), "token_type_ids": torch.zeros_like(ids), "cache_position": torch.arange(4)}
    assert torch.equal(model(ids, labels=ids, **others).loss, model(ids, labels=ids).loss)


def test_an_lstm_has_no_map() -> None:
    with pytest.raises(ValueError, match="has no attention map"):
        language_model("lstm")(tokens(1, 4), output_attentions=True)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["tra", "rope", "forgetting", "lstm"])
def test_compiles(mechanism: str) -> None:
    """Each way of attending once: the operator, SDPA, blocks of rows, none."""
    torch._dynamo.reset()
    model, ids = language_model(mechanism).float(), tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    compiled = torch.compile(model, fullgraph=mechanism != "lstm")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits)
        if mechanism != "lstm":
            real = mask.bool()
            torch.testing.assert_close(compiled(ids, mask, use_cache=False).logits[real], model(ids, mask).logits[real])
    loss = compiled.train()(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, model(ids, labels=ids).loss)


@pytest.mark.parametrize("kind", [TRAForCausalLM, TRAModel])
def test_fsdp_plans_name_modules(kind: type[TRAForCausalLM | TRAModel]) -> None:
    """transformers' plan of base models, and of the head."""
    model = kind(config())
    names = {re.sub(r"\.\d+", ".*", name) for name, _ in model.named_modules()}
    body = "model." if kind is TRAForCausalLM else ""
    head = ["lm_head"] if kind is TRAForCausalLM else []
    assert set(model.fsdp_plan) == {f"{body}{name}" for name in ("embed_tokens", "layers.*", "norm")} | set(head)
    assert set(model.fsdp_plan) <= names
