"""Multi-query associative recall (Arora et al. 2023): a dictionary first, then questions scattered over blanks.

    k7 v2 k1 v9 . . k1 v9 . . . . k7 v2
    └ pairs ──┘     │  └ the value that came with k1: loss and score are on it
                    └ a question

Every key is asked for once. Blanks stand between the questions, so longer splits ask the same number of questions over
a greater distance. Unlike in the original, the answer is shown after its question, as in any language model.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from tra.tasks.base import Batch, Lengths, Task, next_symbol_batch
from tra.tasks.symbols import MAX_SYMBOLS


class MultiQueryRecall(Task):
    """Splits: `train` and `iid` (64 tokens), then `128`, `256`, … `65536`.

    Args:
        length: Tokens of a training sequence; even, and room for all pairs twice.
        pairs: Number of keys, each with a value.
        keys: Number of different keys.
        values: Number of different values.
    """

    name: ClassVar[str] = "mqar"

    def __init__(self, length: int = 64, pairs: int = 8, keys: int = 4096, values: int = 4095) -> None:
        if pairs < 1 or length % 2 or length < 4 * pairs:
            raise ValueError(f"mqar needs an even length of at least 4 · pairs, got {length} and {pairs} pairs")
        if keys < pairs or values < 2:
            raise ValueError(f"mqar needs at least {pairs} keys and 2 values, got {keys} and {values}")
        if keys + values > MAX_SYMBOLS:
            raise ValueError(f"mqar has at most {MAX_SYMBOLS:,} keys and values, got {keys} and {values}")
        own = {split: Lengths(length, length) for split in ("train", "iid")}
        longer = {str(length * by): Lengths(length * by, length * by) for by in (2, 4, 8, 16, 64, 256, 1024)}
        super().__init__(own | longer)
        self.pairs, self.keys, self.values = pairs, keys, values
        self.vocabulary = (".", *(f"k{i}" for i in range(keys)), *(f"v{i}" for i in range(values)))

    def size(self, split: str) -> int:
        return self.lengths(split).longest

    def draw(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch:
        length = self.size(split)
        pairs = self.pairs

        def distinct(of: int) -> torch.Tensor:
            return torch.rand((batch_size, of), generator=generator, device=device).topk(pairs).indices

        key = 1 + distinct(self.keys)
        value = torch.randint(self.values, (batch_size, pairs), generator=generator, device=device) + 1 + self.keys
        asked_at = 2 * pairs + 2 * distinct((length - 2 * pairs) // 2)
        tokens = torch.zeros((batch_size, length), dtype=torch.int64, device=device)
        tokens[:, : 2 * pairs] = torch.stack([key, value], dim=-1).flatten(1)
        tokens.scatter_(1, asked_at, key).scatter_(1, asked_at + 1, value)
        asked = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, asked_at, True)
        return next_symbol_batch(tokens, asked)
