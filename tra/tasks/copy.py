"""Copy: repeat the input.

    <bos> c a b <sep> c a b <eos>
                └ loss and score from here on: c, a, b, <eos>

With a large alphabet each symbol is nearly unique, so content alone finds what comes next; with a small one symbols
repeat, so the model must count. The two fail differently. The paper trains on "input length 50", which we read as up to
50; its format and alphabet aren't known to us, so these are ours.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from tra.tasks.base import Batch, Task, check_lengths, draw_lengths, length_splits, next_symbol_batch
from tra.tasks.symbols import BOS, EOS, FIRST_ID, PAD, SEP, SPECIAL_SYMBOLS, letters

LARGE, SMALL = 64, 4
"""Alphabets in which symbols rarely repeat, and in which they always do."""


class Copy(Task):
    """Splits: `train`, `iid`, `51-100` … `251-300`, and `8x`, `16x`, `64x` the longest training input.

    Args:
        alphabet: Number of symbols.
        shortest: Shortest training input; with `shortest = longest` all have the same length.
        longest: Longest training input, which also sets the test lengths.
    """

    name: ClassVar[str] = "copy"

    def __init__(self, alphabet: int = LARGE, shortest: int = 1, longest: int = 50) -> None:
        check_lengths(self.name, shortest, longest, least=1)
        super().__init__(length_splits(shortest, longest))
        self.vocabulary = SPECIAL_SYMBOLS + letters(alphabet)
        self.alphabet = alphabet

    def size(self, split: str) -> int:
        return 2 * self.lengths(split).longest + 3

    def draw(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch:
        lengths = self.lengths(split)
        n = draw_lengths(lengths, batch_size, generator, device)
        shape = (batch_size, lengths.longest)
        x = torch.randint(FIRST_ID, FIRST_ID + self.alphabet, shape, generator=generator, device=device)
        place = torch.arange(self.size(split), device=device)[None]
        source = torch.where(place <= n, place - 1, place - n - 2).clamp(0, lengths.longest - 1)
        tokens = x.gather(1, source)
        tokens = torch.where(place == 0, BOS, tokens)
        tokens = torch.where(place == n + 1, SEP, tokens)
        tokens = torch.where(place == 2 * n + 2, EOS, tokens)
        tokens = torch.where(place > 2 * n + 2, PAD, tokens)
        return next_symbol_batch(tokens, (place > n) & (place < 2 * n + 2))
