"""Language modelling as a task: in windows of a token stream every next token is a target.

    tokens   <sep> The cat sat on
    targets   The  cat sat on  the

The stream is all documents one after another, with a separator before each.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tra import unknown_name
from tra.tasks import Batch, Lengths, Task
from tra.text import VOCABULARIES, TokenStore, load_tokenizer, shipped_text
from tra.text.tokenizer import Tokenizer
from tra.text.windows import training_windows

HELD_OUT = 0.1
"""Share of the shipped text, at its end, that is for validation."""


class Stream(NamedTuple):
    """Text as ids, from a store or given."""

    name: str
    tokens: npt.NDArray[Any]  # [N]
    documents: npt.NDArray[np.int64]  # [D, 3]: index of the separator, bytes, words; -1 is unknown
    tokenizer: str
    separator: int

    @classmethod
    def of_store(cls, store: TokenStore) -> Stream:
        return cls(store.name, store.tokens, store.documents, store.tokenizer_name, store.separator)

    @classmethod
    def of_text(cls, name: str, text: str, tokenizer: Tokenizer) -> Stream:
        """Return a text as a stream of one document."""
        tokens = np.concatenate([[tokenizer.separator], tokenizer.encode(text)]).astype(tokenizer.dtype)
        documents = np.array([[0, len(text.encode()), len(text.split())]])
        return cls(name, tokens, documents, tokenizer.name, tokenizer.separator)


class Text(Task):
    """Splits: `train`, and `valid` where there is one.

    Args:
        data: A token store, or a folder of stores named train and valid; the text that ships with the package
            (Alice's Adventures in Wonderland) by default.
        tokenizer: gpt2 or bytes; that of the store.
        window: Tokens of a row.
    """

    name: ClassVar[str] = "text"

    def __init__(self, data: str | None = None, tokenizer: str = "bytes", window: int = 128) -> None:
        if tokenizer not in VOCABULARIES:
            raise ValueError(unknown_name("tokenizer", tokenizer, VOCABULARIES))
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        super().__init__({"train": Lengths(window, window), "valid": Lengths(window, window)})
        self.data, self.tokenizer, self.window = data, tokenizer, window
        self._streams: dict[str, Stream] = {}

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the text of every id. Needs the tokenizer's files, unlike everything else of a prepared text."""
        tokens = load_tokenizer(self.tokenizer).token_bytes
        return (*(token.decode(errors="replace") for token in tokens[:-1]), "<sep>")

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary's size, rounded up to a multiple of 64 for fast products. The ids added never occur."""
        return -(-VOCABULARIES[self.tokenizer] // 64) * 64

    def size(self, split: str) -> int:
        return self.lengths(split).longest

    def stream(self, split: str) -> Stream:
        """Return the tokens of a split, which are checked on first use."""
        if split not in self._streams:
            self.lengths(split)
            stream = self._open(split)
            if stream.tokenizer != self.tokenizer:
                raise ValueError(
                    f"{stream.name} was made with the tokenizer {stream.tokenizer!r}, not {self.tokenizer!r}"
                )
            needed = 2 * self.window if split == "train" else self.window + 1  # training windows begin anywhere
            if len(stream.tokens) < needed:
                raise ValueError(
                    f"windows of {self.window:,} tokens need a text of at least {needed:,}, "
                    f"{stream.name} has {len(stream.tokens):,}"
                )
            self._streams[split] = stream
        return self._streams[split]

    def _open(self, split: str) -> Stream:
        if self.data is None:
            text = shipped_text().read_text(encoding="utf-8")
            boundary = text.index("\n\n", int(len(text) * (1 - HELD_OUT)))
            part = text[:boundary] if split == "train" else text[boundary:]
            return Stream.of_text(f"alice-{split}", part, load_tokenizer(self.tokenizer))
        folder = Path(self.data)
        if (folder / split / "manifest.json").is_file():
            return Stream.of_store(TokenStore.open(folder / split))
        if split != "train":
            raise ValueError(f"{folder} has no store named {split}")
        return Stream.of_store(TokenStore.open(folder))

    def check_data(self) -> None:
        self.stream("train")

    def training_rows(self, seed: int, draw: int, rows: int, device: torch.device) -> Batch:
        """Return the rows of a run's `draw`-th draw: random windows, with every token once an epoch."""
        stream = self.stream("train")
        numbers = np.arange(draw * rows, (draw + 1) * rows)
        return self._rows(stream, training_windows(numbers, len(stream.tokens), self.window, seed), device)

    def draw(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch:
        stream = self.stream(split)
        ends = len(stream.tokens) - self.window
        starts = torch.randint(ends, (batch_size,), generator=generator, device=generator.device)
        return self._rows(stream, starts.cpu().numpy(), device)

    def _rows(self, stream: Stream, starts: npt.NDArray[np.int64], device: torch.device) -> Batch:
        ids = stream.tokens[starts[:, None] + np.arange(self.window + 1)].astype(np.int64)
        check_ids(ids, VOCABULARIES[self.tokenizer], stream.name)
        rows = torch.from_numpy(ids).to(device)
        return Batch(rows[:, :-1], rows[:, 1:], torch.ones_like(rows[:, 1:], dtype=torch.bool))

    def render(self, tokens: Tensor) -> str:
        return load_tokenizer(self.tokenizer).decode(tokens.tolist())


def check_ids(ids: npt.NDArray[Any], vocabulary: int, name: str) -> None:
    """Raise a ValueError for ids outside of the vocabulary, on which a GPU would fail without naming the cause."""
    if ids.size and (ids.max() >= vocabulary or ids.min() < 0):
        wrong = ids[(ids >= vocabulary) | (ids < 0)].ravel()[0]
        raise ValueError(f"{name} holds the id {wrong}, outside of the vocabulary's 0..{vocabulary - 1}")
