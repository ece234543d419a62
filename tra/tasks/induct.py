"""Induct: find the only earlier occurrence of a symbol, and give the symbol after it.

    <bos> c a b d <sep> a b
                        │ └ the answer: b followed the only a. Loss and score are on it alone
                        └ the question

With a small alphabet the other symbols repeat, but the asked symbol never does. An input has at least two symbols, and
the asked one is never the last, so that another follows. Format and alphabet are ours, as in copy.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from tra.tasks.base import Batch, Task, check_lengths, draw_lengths, length_splits, next_symbol_batch
from tra.tasks.copy import LARGE
from tra.tasks.symbols import BOS, FIRST_ID, PAD, SEP, SPECIAL_SYMBOLS, letters


class Induct(Task):
    """Splits: `train`, `iid`, `51-100` … `251-300`, and `8x`, `16x`, `64x` the longest training input.

    Args:
        alphabet: Number of symbols.
        shortest: Shortest training input, at least 2.
        longest: Longest training input, which also sets the test lengths.
    """

    name: ClassVar[str] = "induct"

    def __init__(self, alphabet: int = LARGE, shortest: int = 2, longest: int = 50) -> None:
        check_lengths(self.name, shortest, longest, least=2)
        super().__init__(length_splits(shortest, longest))
        self.vocabulary = SPECIAL_SYMBOLS + letters(alphabet)
        self.alphabet = alphabet

    def size(self, split: str) -> int:
        return self.lengths(split).longest + 4

    def draw(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch:
        lengths = self.lengths(split)
        n = draw_lengths(lengths, batch_size, generator, device)
        question = torch.randint(self.alphabet, (batch_size, 1), generator=generator, device=device)
        # All other symbols are drawn from the alphabet without the question's.
        x = torch.randint(self.alphabet - 1, (batch_size, lengths.longest), generator=generator, device=device)
        x = x + (x >= question)
        chance = torch.rand((batch_size, 1), generator=generator, device=device)
        where = (chance * (n - 1)).long().clamp_(max=lengths.longest - 2)
        answer = x.gather(1, where + 1)
        x = x.scatter(1, where, question)
        place = torch.arange(self.size(split), device=device).expand(batch_size, -1)
        tokens = x.gather(1, (place - 1).clamp(0, lengths.longest - 1)) + FIRST_ID
        tokens = torch.where(place == 0, BOS, tokens)
        tokens = torch.where(place == n + 1, SEP, tokens)
        tokens = torch.where(place == n + 2, question + FIRST_ID, tokens)
        tokens = torch.where(place == n + 3, answer + FIRST_ID, tokens)
        tokens = torch.where(place > n + 3, PAD, tokens)
        return next_symbol_batch(tokens, place == n + 2)
