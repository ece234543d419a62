"""Where documents begin in each format, and where a long one may be divided for the tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tra.text.store import TokenPart
from tra.text.tokenizer import Tokenizer

PART_CHARACTERS = 2**14
"""Characters from which a document is divided: tokenizers are not faster on longer texts, and need more memory."""

# GPT-2 splits a text into words from left to right, and none of its patterns continues from a non-space character to a
# space. Dividing a text between the two therefore changes no token. Python takes more characters for spaces than GPT-2
# does, hence the short list on the right.
_BOUNDARY = re.compile(r"(?<=\S)[ \t\r\n]")

# ` = Title = ` and, where the spacing is undone, `= Title =`; sections have more than one `=`.
_HEADING = re.compile(r" ?= [^=\s](?:.*[^=\s])? = ?\n?")


class TextPart(NamedTuple):
    """A document, or the next part of one, as text."""

    begins: bool
    """A document starts here."""
    text: str


class DocumentSplitter:
    """Divides documents, given bit by bit, into parts whose tokens together are those of the whole."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._length = 0
        self._begins = True

    def add(self, text: str) -> Iterator[TextPart]:
        """Take more of the document, and yield the parts that are complete."""
        start = 0
        while self._length + len(text) - start > PART_CHARACTERS:
            boundary = _BOUNDARY.search(text, start + max(0, PART_CHARACTERS - self._length))
            if boundary is None:
                break
            self._append(text[start : boundary.start()])
            yield self._take()
            start = boundary.start()
        self._append(text[start:])

    def end(self) -> Iterator[TextPart]:
        """Yield the rest of the document. What is added next belongs to another."""
        if self._length:
            yield self._take()
        self._begins = True

    def _append(self, text: str) -> None:
        self._texts.append(text)
        self._length += len(text)

    def _take(self) -> TextPart:
        part = TextPart(self._begins, "".join(self._texts))
        self._texts, self._length, self._begins = [], 0, False
        return part


def articles(lines: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """Yield WikiText's lines, each with whether an article begins there: at the blank line before its heading.

    Divided there, articles have the tokens of the whole file, in the raw and in the detokenised form. A formula may
    look like a heading, but has no blank lines around it.
    """
    stream = iter(lines)
    line, following, after = (next(stream, None) for _ in range(3))
    begins, has_text = True, False  # an article begins here; a line before this one had text
    while line is not None:
        is_blank = not line.strip()
        is_heading = following is not None and _HEADING.fullmatch(following) and not (after and after.strip())
        yield begins or bool(has_text and is_blank and is_heading), line
        begins, has_text = False, has_text or not is_blank
        line, following, after = following, after, next(stream, None)


def json_texts(lines: Iterable[str], path: Path, titled: bool = False) -> Iterator[str]:
    """Yield the `text` of each line; when `titled`, below its `title` in the form of Wikipedia's headings."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number:,}: not JSON ({error})") from None
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'{path}, line {number:,}: no field "text" that is a string')
        if titled:
            if not isinstance(row.get("title"), str):
                raise ValueError(f'{path}, line {number:,}: no field "title" that is a string')
            text = f"= {row['title']} =\n\n{text}\n"
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{path}, line {number:,}: half a surrogate pair, which is no text") from None
        yield text


def token_ids(blocks: Iterable[bytes], path: Path, tokenizer: Tokenizer) -> Iterator[npt.NDArray[Any]]:
    """Yield the ids of a file of little-endian uint16, checked."""
    left, done = b"", 0  # an odd byte, and the ids so far
    for block in blocks:
        block = left + block
        ids = np.frombuffer(block, dtype="<u2", count=len(block) // 2)
        left = block[2 * len(ids) :]
        if ids.size and ids.max() >= tokenizer.vocab_size:
            place = int(np.argmax(ids >= tokenizer.vocab_size))
            raise ValueError(
                f"{path} is not a stream of {tokenizer.name} tokens: id {ids[place]:,} at place {done + place:,}, "
                f"of a vocabulary of {tokenizer.vocab_size:,}"
            )
        done += len(ids)
        yield ids
    if left:
        raise ValueError(f"{path} is not a stream of uint16 tokens: it has an odd number of bytes")


def token_documents(stream: Iterable[npt.NDArray[Any]], tokenizer: Tokenizer) -> Iterator[TokenPart]:
    """Yield the documents of a stream given in blocks: one begins at the start and after each separator."""
    words = _WordCounter(tokenizer)
    begins = True
    for ids in stream:
        ends = np.flatnonzero(ids == tokenizer.separator)
        for number, part in enumerate(np.split(ids, ends)):
            if number:  # all but the first part start with a separator
                part, begins = part[1:], True
            if part.size:
                yield TokenPart(begins, part, int(tokenizer.byte_lengths[part].sum()), words.count(part, begins))
                begins = False


class _WordCounter:
    """Counts the words of a text by its tokens, without decoding it: a word begins after a space."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = tokenizer.token_bytes
        self._starts_with_space = np.array([token != token.lstrip() for token in tokens])
        self._ends_with_space = np.array([token != token.rstrip() for token in tokens])
        words = np.array([len(token.split()) for token in tokens])
        self._new_words = words - ~self._starts_with_space  # a word at the token's start may have begun before it
        self._after_space = True

    def count(self, ids: npt.NDArray[Any], begins: bool) -> int:
        after_space = np.concatenate(([begins or self._after_space], self._ends_with_space[ids[:-1]]))
        self._after_space = bool(self._ends_with_space[ids[-1]])
        return int(self._new_words[ids].sum() + (after_space & ~self._starts_with_space[ids]).sum())
