"""A task of your own: repeat the input backwards.

tra train --preset copy-quick task.name=examples/own_task.py:Reverse
tra evaluate runs/copy-quick-tra --import examples/own_task.py
"""

from __future__ import annotations

from typing import ClassVar

import torch

from tra.tasks import BOS, FIRST_ID, SEP, SPECIAL_SYMBOLS, Batch, Lengths, Task, letters, next_symbol_batch


class Reverse(Task):
    """`<bos> a b c <sep> c b a`: loss and score from <sep> on. Splits: the trained length, 2 and 4 times it."""

    name: ClassVar[str] = "reverse"

    def __init__(self, length: int = 8, alphabet: int = 8) -> None:
        super().__init__({name: Lengths(by * length, by * length) for name, by in (("train", 1), ("2x", 2), ("4x", 4))})
        self.vocabulary = SPECIAL_SYMBOLS + letters(alphabet)

    def size(self, split: str) -> int:
        return 2 * self.lengths(split).longest + 2

    def draw(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch:
        n, end = self.lengths(split).longest, len(self.vocabulary)
        x = torch.randint(FIRST_ID, end, (batch_size, n), generator=generator, device=device)
        bos, sep = (torch.full_like(x[:, :1], symbol) for symbol in (BOS, SEP))
        tokens = torch.cat([bos, x, sep, x.flip(1)], dim=1)
        place = torch.arange(tokens.shape[1], device=device)
        return next_symbol_batch(tokens, ((place > n) & (place < 2 * n + 1)).expand_as(tokens))
