"""Copy: say again what was said.

    <bos> c a b <sep> c a b <eos>
                └ loss and score from here on: c, a, b, <eos>

A large alphabet makes each symbol nearly unique, so content alone finds the place; a small one repeats, so the model
must keep count. The two fail differently. The paper trains on "input length 50", which we read as up to 50; its format
and alphabet aren't known to us, so these are ours.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from tra.tasks._base import Batch, Lengths, Task, buckets, check_range, draw_lengths, letters, shifted

PAD, BOS, SEP, EOS = range(4)
SPECIAL = ("<pad>", "<bos>", "<sep>", "<eos>")
FIRST = len(SPECIAL)
LARGE, SMALL = 64, 4
"""Alphabets in which symbols rarely repeat, and in which they always do."""


def length_splits(shortest: int, longest: int) -> dict[str, Lengths]:
    """Training lengths, buckets up to six times as long, and a ladder far beyond."""
    bucketed = buckets(*(longest * k for k in range(1, 7)))
    ladder = {f"{by}x": Lengths(longest * by, longest * by) for by in (8, 16, 64)}
    return {"train": Lengths(shortest, longest), "iid": Lengths(shortest, longest)} | bucketed | ladder


class Copy(Task):
    """Splits: `train`, `iid`, `51-100` … `251-300`, and `8x`, `16x`, `64x` the longest training input.

    Args:
        alphabet: Number of symbols.
        shortest: Shortest training input; with `shortest = longest` all have the same length.
        longest: Longest training input, which also sets the test lengths.
    """

    name: ClassVar[str] = "copy"

    def __init__(self, alphabet: int = LARGE, shortest: int = 1, longest: int = 50) -> None:
        check_range(self.name, shortest, longest, least=1)
        super().__init__(length_splits(shortest, longest))
        self.vocabulary = SPECIAL + letters(alphabet)
        self.alphabet = alphabet

    def size(self, split: str) -> int:
        return 2 * self.lengths(split).longest + 3

    def _sample(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch:
        lengths = self.lengths(split)
        n = draw_lengths(lengths, batch_size, generator, device)
        shape = (batch_size, lengths.longest)
        x = torch.randint(FIRST, FIRST + self.alphabet, shape, generator=generator, device=device)
        place = torch.arange(self.size(split), device=device)[None]
        source = torch.where(place <= n, place - 1, place - n - 2).clamp(0, lengths.longest - 1)
        tokens = x.gather(1, source)
        tokens = torch.where(place == 0, BOS, tokens)
        tokens = torch.where(place == n + 1, SEP, tokens)
        tokens = torch.where(place == 2 * n + 2, EOS, tokens)
        tokens = torch.where(place > 2 * n + 2, PAD, tokens)
        return shifted(tokens, (place > n) & (place < 2 * n + 2))
