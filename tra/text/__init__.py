"""Text for language models: tokenizers, sources, and the token stores that are made from them."""

from pathlib import Path

from tra.text.store import TokenStore
from tra.text.tokenizer import VOCABULARIES, Tokenizer, load_tokenizer

__all__ = ["VOCABULARIES", "TokenStore", "Tokenizer", "load_tokenizer", "shipped_text"]


def shipped_text() -> Path:
    """A small text that comes with the package: Alice's Adventures in Wonderland, in the public domain."""
    return Path(__file__).with_name("alice.txt")
