"""Documents of a text on this machine for EleutherAI's harness, which imports this file by its path.

The text is what `tra prepare` takes for one: a WikiText file, .txt, .jsonl, also compressed. It is scored as it is, so
that results can be held against `tra evaluate --text`; but `<|endoftext|>` written in it is a separator to the harness,
and text to `tra evaluate`.
"""

from __future__ import annotations

import os
from typing import Any

from tra.text.formats import TextPart
from tra.text.sources import find_sources
from tra.text.tokenizer import ByteTokenizer

VARIABLE = "TRA_TEXT"


def documents(path: str | None = None, **_others: Any) -> dict[str, Any]:
    """Return the split `test`, with rows that have a `text`.

    Args:
        path: The text, from --metadata '{"path": "wiki.test.raw"}'; else the environment variable TRA_TEXT names it.
    """
    from datasets import Dataset

    path = path or os.environ.get(VARIABLE)
    if not path:
        raise ValueError(f"name the text: in the environment variable {VARIABLE}, or as --metadata '{{\"path\": …}}'")
    return {"test": Dataset.from_list([{"text": text} for text in read_documents(path)])}


def read_documents(path: str) -> list[str]:
    """Return whole documents, in order. For a folder with splits, these are the documents of its test split."""
    splits = find_sources([path])
    found = splits.get("") or splits.get("test")
    if found is None:
        raise ValueError(f"{path} has no test split: it has {', '.join(splits)}")
    texts: list[str] = []
    for source in found:
        for part in source.parts(ByteTokenizer(), lambda _count: None):
            if not isinstance(part, TextPart):
                raise ValueError(f"{path} is a token stream; the harness needs text")
            if part.begins:
                texts.append(part.text)
            else:
                texts[-1] += part.text
    return texts


def process_results(doc: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """Return log-likelihoods with their divisors: words between white space, and bytes of UTF-8."""
    (log_likelihood,) = results
    words, size = len(doc["text"].split()), len(doc["text"].encode())
    return {
        "word_perplexity": (log_likelihood, words),
        "byte_perplexity": (log_likelihood, size),
        "bits_per_byte": (log_likelihood, size),
    }
