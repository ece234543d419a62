"""A run's tokenizer, in the form that AutoTokenizer loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from tra.tasks import Task
from tra.text import load_tokenizer
from tra.text.task import Text
from tra.text.tokenizer import Gpt2Tokenizer, Tokenizer, byte_alphabet

SEPARATOR = "<|endoftext|>"
"""Stands before each document, and so marks the end of the one before."""

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
"""Roles of special tokens, and the symbols of tasks that have them."""


def run_tokenizer(task: Task, files: Path | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a task's symbols or of a language model's text; `files` as in `load_tokenizer`."""
    if isinstance(task, Text):
        return _text_tokenizer(load_tokenizer(task.tokenizer, files))
    return _symbol_tokenizer(task)


def _text_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    library: Any
    if isinstance(tokenizer, Gpt2Tokenizer):
        library = Library.from_str(tokenizer._library.to_str())
    else:
        library = Library(models.BPE(byte_alphabet(), []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    # Padding has an id of its own: collators mask its labels, and the end of a text must be learnt. Unlike in
    # `tra prepare`, special tokens written in a text are special, as chat templates need.
    special = dict.fromkeys(("bos_token", "eos_token"), SEPARATOR) | {"pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=library, padding_side="left", **special)
    assert fast.eos_token_id == tokenizer.separator
    return fast


def _symbol_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Return a tokenizer of what `task.render` writes: symbols with spaces between, or without."""
    library: Any = Library(models.WordLevel({symbol: index for index, symbol in enumerate(task.vocabulary)}))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if " " not in task.render(torch.tensor([0, 1])):
        characters = pre_tokenizers.Split(Regex("."), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([library.pre_tokenizer, characters])
        library.decoder = decoders.Fuse()
    special = {role: symbol for role, symbol in SPECIAL.items() if symbol in task.vocabulary}
    return PreTrainedTokenizerFast(tokenizer_object=library, padding_side="left", **special)
