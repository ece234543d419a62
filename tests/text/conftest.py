"""Tokenizers, read once."""

from __future__ import annotations

import pytest

from tra.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def gpt2() -> Tokenizer:
    return load_tokenizer("gpt2")


@pytest.fixture(scope="session")
def plain_bytes() -> Tokenizer:
    return load_tokenizer("bytes")
