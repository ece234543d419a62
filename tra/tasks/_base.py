"""What every task is: a vocabulary, named splits, and a sampler that runs on the device."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tra import unknown_name


class Batch(NamedTuple):
    """Sequences and what to predict, each `[B, T]`. Loss and score count only where `loss_mask` is True."""

    tokens: Tensor  # int64
    targets: Tensor  # int64, already shifted: targets[:, t] is the symbol after tokens[:, t]
    loss_mask: Tensor  # bool


class Lengths(NamedTuple):
    """Range of input lengths of a split, both ends included."""

    shortest: int
    longest: int


class Task(ABC):
    """A task draws endless examples. All randomness comes from the generator that is handed in."""

    name: ClassVar[str]
    vocabulary: tuple[str, ...]
    """Symbols indexed by id."""

    def __init__(self, lengths: dict[str, Lengths]) -> None:
        self._lengths = lengths

    @property
    def vocab_size(self) -> int:
        """Ids a model needs to know."""
        return len(self.vocabulary)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names in order, "train" first."""
        return tuple(self._lengths)

    def lengths(self, split: str) -> Lengths:
        """Input lengths of a split."""
        if split not in self._lengths:
            raise ValueError(unknown_name(f"split of {self.name}", split, self.splits))
        return self._lengths[split]

    @abstractmethod
    def size(self, split: str) -> int:
        """T of the split's batches: every batch of a split has the same shape."""

    @abstractmethod
    def _sample(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch: ...

    def sample(
        self,
        split: str,
        batch_size: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Draw a batch. The same generator state on the same kind of device gives the same batch."""
        self.lengths(split)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return self._sample(split, batch_size, generator, torch.device(device))

    def check_data(self) -> None:  # noqa: B027 most have nothing to check
        """Whether what training reads is there and fits; a ValueError if not. A task that draws needs nothing."""

    def training_rows(self, seed: int, draw: int, rows: int, device: torch.device) -> Batch:
        """The rows of a run's `draw`-th draw; every draw of a run has as many."""
        return self.sample("train", rows, generator(seed, "train", draw, device), device)

    def render(self, tokens: Tensor) -> str:
        """A sequence `[T]` as text."""
        return " ".join(self.vocabulary[token] for token in tokens.tolist())


def generator(seed: int, stream: str, index: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """Randomness of one stream ("train", "test/sparse", …): streams of other names share nothing with it."""
    return torch.Generator(device).manual_seed(stream_seed(seed, stream, index))


def stream_seed(seed: int, stream: str, index: int = 0) -> int:
    digest = hashlib.blake2b(f"{stream}/{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def shifted(tokens: Tensor, loss_mask: Tensor) -> Batch:
    """A batch whose targets are the next symbols; the last position has none and doesn't count."""
    targets = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)
    return Batch(tokens, targets, loss_mask)


def check_range(name: str, shortest: int, longest: int, least: int) -> None:
    if not least <= shortest <= longest:
        raise ValueError(f"{name} lengths must satisfy {least} <= shortest <= longest, got {shortest} and {longest}")


def letters(count: int) -> tuple[str, ...]:
    """`count` distinct symbols: a, b, … z, then a1, b1, …"""
    if count < 2:
        raise ValueError(f"an alphabet needs at least 2 symbols, got {count}")
    names = "abcdefghijklmnopqrstuvwxyz"
    return tuple(names[i % 26] + (str(i // 26) if i >= 26 else "") for i in range(count))


def draw_lengths(lengths: Lengths, batch_size: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """`[B, 1]` int64, uniform over the range."""
    return torch.randint(lengths.shortest, lengths.longest + 1, (batch_size, 1), generator=generator, device=device)


def buckets(*edges: int) -> dict[str, Lengths]:
    """(50, 100, 200) -> "51-100" and "101-200"."""
    return {f"{a + 1}-{b}": Lengths(a + 1, b) for a, b in itertools.pairwise(edges)}
