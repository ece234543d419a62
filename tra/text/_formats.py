"""How each format says where documents begin, and where a long one may be cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tra.text.store import Encoded
from tra.text.tokenizer import Tokenizer

PIECE = 2**14
"""Characters from which a document is cut into pieces: tokenizers are no faster on more, and hold less."""

# GPT-2 looks for words in a text from left to right, and none of its patterns goes on from a black character to a white
# one. A cut between the two therefore changes no token, whatever stands further on either side. Python takes more
# characters for white than GPT-2, hence the short list on the right.
_CUT = re.compile(r"(?<=\S)[ \t\r\n]")

# ` = Title = ` and, where the spacing is undone, `= Title =`; sections have more than one `=`.
_HEADING = re.compile(r" ?= [^=\s](?:.*[^=\s])? = ?\n?")


class Piece(NamedTuple):
    """A document, or the next part of one, as text."""

    begins: bool
    text: str


class Cutter:
    """Text that comes bit by bit, as pieces whose tokens are those of the whole."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._length = 0
        self._begins = True

    def add(self, text: str) -> Iterator[Piece]:
        """What of the document is certain by now."""
        start = 0
        while self._length + len(text) - start > PIECE:
            cut = _CUT.search(text, start + max(0, PIECE - self._length))
            if cut is None:
                break
            self._hold(text[start : cut.start()])
            yield self._release()
            start = cut.start()
        self._hold(text[start:])

    def end(self) -> Iterator[Piece]:
        """The rest of the document. What is added next belongs to another."""
        if self._length:
            yield self._release()
        self._begins = True

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._length += len(text)

    def _release(self) -> Piece:
        piece = Piece(self._begins, "".join(self._held))
        self._held, self._length, self._begins = [], 0, False
        return piece


def articles(lines: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """WikiText's lines, and whether an article begins with one: with the blank line before its heading.

    Cut there, articles have the tokens of the whole file, in the raw form and in the one whose spacing is undone. A
    formula may look like a heading, but it has no blank lines around it.
    """
    stream = iter(lines)
    line, following, after = (next(stream, None) for _ in range(3))
    begins, seen = True, False  # an article begins; text was seen before this line
    while line is not None:
        is_blank = not line.strip()
        is_heading = following is not None and _HEADING.fullmatch(following) and not (after and after.strip())
        yield begins or bool(seen and is_blank and is_heading), line
        begins, seen = False, seen or not is_blank
        line, following, after = following, after, next(stream, None)


def json_texts(lines: Iterable[str], path: Path, titled: bool = False) -> Iterator[str]:
    """The `text` of each line; with its `title` above it, as Wikipedia's headings are, when `titled`."""
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
    """A file of little-endian uint16, checked."""
    left, done = b"", 0
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


def token_documents(stream: Iterable[npt.NDArray[Any]], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Documents of a stream that comes in blocks: one begins after each separator, and at the start."""
    words = _WordCounter(tokenizer)
    begins = True
    for ids in stream:
        ends = np.flatnonzero(ids == tokenizer.separator)
        for number, part in enumerate(np.split(ids, ends)):
            if number:  # all but the first start with a separator
                part, begins = part[1:], True
            if part.size:
                yield Encoded(begins, part, int(tokenizer.byte_lengths[part].sum()), words.count(part, begins))
                begins = False


class _WordCounter:
    """Words of a text from its tokens, without decoding it: a word begins where black follows white."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        white = (
            [token != token.lstrip() for token in tokenizer.token_bytes],
            [token != token.rstrip() for token in tokenizer.token_bytes],
        )
        self._starts_white, self._ends_white = (np.array(values) for values in white)
        words = np.array([len(token.split()) for token in tokenizer.token_bytes])
        self._inside = words - ~self._starts_white  # a word at the token's start may have begun before it
        self._after_white = True

    def count(self, ids: npt.NDArray[Any], begins: bool) -> int:
        before = np.concatenate(([begins or self._after_white], self._ends_white[ids[:-1]]))
        self._after_white = bool(self._ends_white[ids[-1]])
        return int(self._inside[ids].sum() + (before & ~self._starts_white[ids]).sum())
