"""Text for language models: tokenizers, sources of text, and the token stores made from them."""

from pathlib import Path

from tra.text.store import TokenStore
from tra.text.tokenizer import VOCABULARIES, Tokenizer, load_tokenizer

__all__ = ["VOCABULARIES", "TokenStore", "Tokenizer", "load_tokenizer", "shipped_text"]


def shipped_text() -> Path:
    """Return the text that ships with the package: Alice's Adventures in Wonderland, in the public domain."""
    return Path(__file__).with_name("alice.txt")
