"""Flip-flop language modelling (Liu et al. 2023): remember one bit through any amount of noise.

    w 1  i 0  i 1  r 1  w 0  i 1  r 0
    │    │         │         │
    │    │         │         └ the last written bit is 0 now
    │    │         └ read: the last written bit, 1
    │    └ ignore: the remembered bit stays, whatever follows
    └ write 1

Each instruction is a letter and a bit. The first writes, the last reads, the others ignore with probability p and
write or read with (1 - p) / 2 each. Loss and score are on the bit after each `r`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tra.tasks.base import Batch, Lengths, Task, next_symbol_batch

WRITE, READ, IGNORE, ZERO = range(4)


class FlipFlop(Task):
    """Splits: `train` and `iid` (p = 0.8), `sparse` (0.98), `dense` (0.1), and longer sequences at p = 0.8.

    Args:
        length: Symbols of a training sequence, two per instruction; even, at least 4.
    """

    name: ClassVar[str] = "flipflop"

    def __init__(self, length: int = 512) -> None:
        if length < 4 or length % 2:
            raise ValueError(f"flipflop needs an even length of at least 4, got {length}")
        times = {"2x": 2, "4x": 4, "16x": 16, "64x": 64}
        super().__init__(
            {split: Lengths(length, length) for split in ("train", "iid", "sparse", "dense")}
            | {split: Lengths(length * by, length * by) for split, by in times.items()}
        )
        self.vocabulary = ("w", "r", "i", "0", "1")

    def size(self, split: str) -> int:
        return self.lengths(split).longest

    def ignore_probability(self, split: str) -> float:
        return {"sparse": 0.98, "dense": 0.1}.get(split, 0.8)

    def draw(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch:
        shape = (batch_size, self.size(split) // 2)
        ignore = self.ignore_probability(split)
        chance = torch.rand(shape, generator=generator, device=device)
        instruction = torch.where(chance < ignore, IGNORE, torch.where(chance < (1 + ignore) / 2, WRITE, READ))
        instruction[:, 0], instruction[:, -1] = WRITE, READ
        bit = torch.randint(2, shape, generator=generator, device=device)
        index = torch.arange(shape[1], device=device)
        last_write = torch.where(instruction == WRITE, index, 0).cummax(1).values
        bit = torch.where(instruction == READ, bit.gather(1, last_write), bit)
        return self.batch_of(torch.stack([instruction, bit + ZERO], dim=-1).flatten(1))

    @staticmethod
    def batch_of(tokens: Tensor) -> Batch:
        """Return whole sequences `[B, T]` as a batch that scores the bit after each read."""
        return next_symbol_batch(tokens, tokens == READ)

    def render(self, tokens: Tensor) -> str:
        """Return a sequence without spaces, in the form of the hub's rows: `w1i0r1`."""
        return "".join(self.vocabulary[token] for token in tokens.tolist())

    def parse(self, row: str) -> Tensor:
        """Return the ids `[T]` of a row such as `w1i0r1`, which must follow the rules of the language."""
        ids = [self.vocabulary.index(symbol) if symbol in self.vocabulary else -1 for symbol in row]
        if len(ids) < 4 or len(ids) % 2 or ids[0] != WRITE:
            raise ValueError(f"a flip-flop row has an even length and starts with w, got {row[:20]!r}")
        memory = ids[1]
        for place in range(0, len(ids), 2):
            instruction, bit = ids[place : place + 2]
            if instruction not in (WRITE, READ, IGNORE) or bit < ZERO:
                raise ValueError(f"expected w, r or i and a bit at symbol {place}, got {row[place : place + 2]!r}")
            if instruction == WRITE:
                memory = bit
            elif instruction == READ and bit != memory:
                raise ValueError(f"the read at symbol {place} gives {row[place + 1]}, but the other bit was written")
        return torch.tensor(ids)

    def read_rows(self, path: Path | str) -> Tensor:
        """Return all rows of a text file in the form of the hub's `synthseq/flipflop`, `[N, T]`."""
        rows: list[Tensor] = []
        for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                rows.append(self.parse(line.strip()))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            if len(rows[-1]) != len(rows[0]):
                raise ValueError(f"{path}, line {number}: {len(rows[-1])} symbols, the rows before have {len(rows[0])}")
        if not rows:
            raise ValueError(f"{path} has no rows")
        return torch.stack(rows)
