"""Define tasks: a vocabulary, named splits, and a sampler that runs on the device; and parts to build a task from."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tra import unknown_name

MAX_LENGTH = 2**36
"""Longest input of a split. Beyond it no memory holds a sequence, and sizes come near 64 bits."""


class Batch(NamedTuple):
    """Sequences and what to predict, each `[B, T]`. Only positions where `loss_mask` is True count."""

    tokens: Tensor  # int64
    targets: Tensor  # int64, already shifted: targets[:, t] is the symbol after tokens[:, t]
    loss_mask: Tensor  # bool


class Lengths(NamedTuple):
    """Range of input lengths of a split, both ends included."""

    shortest: int
    longest: int


class Task(ABC):
    """A source of endless examples, whose randomness comes from the generator that is given.

    A task defines `name`, `vocabulary`, `size` and `draw`, and gives its splits to this constructor.
    """

    name: ClassVar[str]
    vocabulary: tuple[str, ...]
    """Symbols indexed by id."""

    def __init__(self, lengths: dict[str, Lengths]) -> None:
        longest = max(split.longest for split in lengths.values())
        if longest > MAX_LENGTH:
            raise ValueError(f"{self.name} has a split of {longest:,} symbols, more than {MAX_LENGTH:,}: shorten it")
        self._lengths = lengths

    @property
    def vocab_size(self) -> int:
        """Return how many ids a model needs."""
        return len(self.vocabulary)

    @property
    def splits(self) -> tuple[str, ...]:
        """Return their names in order, "train" first."""
        return tuple(self._lengths)

    def lengths(self, split: str) -> Lengths:
        """Return the input lengths of a split."""
        if split not in self._lengths:
            raise ValueError(unknown_name(f"split of {self.name}", split, self.splits))
        return self._lengths[split]

    @abstractmethod
    def size(self, split: str) -> int:
        """Return T of the split's batches: every batch of a split has the same shape."""

    @abstractmethod
    def draw(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch:
        """Draw a batch of a split that exists. Call `sample` instead, which checks its arguments."""

    def sample(
        self, split: str, batch_size: int, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> Batch:
        """Draw a batch. The same generator state on the same kind of device gives the same batch."""
        self.lengths(split)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return self.draw(split, batch_size, generator, torch.device(device))

    def check_data(self) -> None:  # noqa: B027 most tasks read nothing
        """Raise a ValueError if data that training reads is missing or unfit."""

    def training_rows(self, seed: int, draw: int, rows: int, device: torch.device) -> Batch:
        """Return the rows of a run's `draw`-th draw. `rows` is the same in every draw of a run."""
        return self.sample("train", rows, generator(seed, "train", draw, device), device)

    def render(self, tokens: Tensor) -> str:
        """Return a sequence `[T]` as text."""
        return " ".join(self.vocabulary[token] for token in tokens.tolist())


def generator(seed: int, stream: str, index: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for one stream of random numbers, such as "train" or "test/sparse"; others are independent."""
    return torch.Generator(device).manual_seed(stream_seed(seed, stream, index))


def stream_seed(seed: int, stream: str, index: int = 0) -> int:
    """Return the seed of a stream of random numbers."""
    digest = hashlib.blake2b(f"{stream}/{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def next_symbol_batch(tokens: Tensor, loss_mask: Tensor) -> Batch:
    """Return a batch whose targets are the next symbols. The last position has none, and must be False in the mask."""
    targets = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)
    return Batch(tokens, targets, loss_mask)


def check_lengths(name: str, shortest: int, longest: int, least: int) -> None:
    """Raise a ValueError if a range of input lengths is empty or begins below `least`."""
    if not least <= shortest <= longest:
        raise ValueError(f"{name} lengths must satisfy {least} <= shortest <= longest, got {shortest} and {longest}")


def draw_lengths(lengths: Lengths, batch_size: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw input lengths `[B, 1]` int64, uniform over the range."""
    return torch.randint(lengths.shortest, lengths.longest + 1, (batch_size, 1), generator=generator, device=device)


def length_buckets(*edges: int) -> dict[str, Lengths]:
    """Return splits between neighbouring edges: (50, 100, 200) -> "51-100" and "101-200"."""
    return {f"{a + 1}-{b}": Lengths(a + 1, b) for a, b in itertools.pairwise(edges)}


def length_splits(shortest: int, longest: int) -> dict[str, Lengths]:
    """Return the training lengths, buckets up to 6 times the longest, and 8, 16 and 64 times the longest."""
    trained = Lengths(shortest, longest)
    multiples = {f"{by}x": Lengths(longest * by, longest * by) for by in (8, 16, 64)}
    return {"train": trained, "iid": trained} | length_buckets(*(longest * k for k in range(1, 7))) | multiples
