"""Exports that are fine-tuned with new tokens and chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.hub.test_export import make_text_export

CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_export(tmp_path_factory.mktemp("export"))


@pytest.mark.parametrize("resize", [False, True])
def test_added_tokens_can_be_generated(folder: Path, resize: bool) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    new = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if resize or new >= model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():  # as if it had been learnt: whatever comes before, the new token is the likeliest
        hidden = model.model(**tokenizer("Alice was", return_tensors="pt")).last_hidden_state[0, -1]
        model.lm_head.weight[new] = 100 * hidden
    out = model.generate(**tokenizer("Alice was", return_tensors="pt"), max_new_tokens=1, do_sample=False)
    assert out[0, -1] == new


def test_rows_of_padding_are_not_generated(folder: Path) -> None:
    """Nothing is suppressed by id, so rows past the tokenizer must be unlikely by themselves."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert GenerationConfig.from_pretrained(folder).suppress_tokens is None
    torch.manual_seed(0)
    inputs = tokenizer(["Alice was"] * 64, return_tensors="pt")
    said = model.generate(**inputs, max_new_tokens=64, do_sample=True, temperature=1.0, eos_token_id=None)
    assert int(said.max()) < len(tokenizer)


def test_special_tokens_in_text_are_one_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert not tokenizer.split_special_tokens
    assert tokenizer("<|endoftext|>").input_ids == [tokenizer.eos_token_id]
    assert tokenizer("<|endoftext|>", split_special_tokens=True).input_ids != [tokenizer.eos_token_id]


def test_chat_templates_work(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHAT
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=True, return_dict=True)
    ids = text["input_ids"]
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert ids.count(start) == ids.count(end) == 1
    assert ids[0] == start
    assert ids[-1] == end


def test_padding_has_a_token_of_its_own(folder: Path) -> None:
    """A collator masks labels at the padding token: were it the end token, no end would ever be learnt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id is not None
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id < model.config.vocab_size
