"""Instruct: seven operations on a sequence, one named at its start.

    <bos> reverse c a b <sep> b a c <eos>
    <bos> keep c a* b* <sep> a b <eos>
                       └ loss and score from here on

    copy      c a b d    ->  c a b d
    reverse   c a b d    ->  d b a c
    first     c a b d    ->  c
    last      c a b d    ->  d
    swap      c a b d e  ->  a c d b e     neighbouring pairs change places
    map       c a b d    ->  each symbol through one fixed permutation
    keep      c a* b d*  ->  a d           the marked ones, without their mark

Inputs and outputs may be empty. The paper has a set of this kind; its operations aren't known to us, so these seven are
ours.
"""

from __future__ import annotations

import random
from typing import ClassVar

import torch
from torch import Tensor

from tra.tasks.base import Batch, Lengths, Task, check_lengths, draw_lengths, length_buckets, next_symbol_batch
from tra.tasks.symbols import BOS, EOS, FIRST_ID, PAD, SEP, SPECIAL_SYMBOLS, letters

OPERATIONS = ("copy", "reverse", "first", "last", "swap", "map", "keep")
COPY, REVERSE, TAKE_FIRST, TAKE_LAST, SWAP, MAP, KEEP = range(len(OPERATIONS))
FIRST_SYMBOL = FIRST_ID + len(OPERATIONS)


class Instruct(Task):
    """Splits: `train` and `iid` (lengths 0-50), `51-100`, `101-200`, … `401-500`.

    Args:
        alphabet: Number of symbols, not counting the marked ones.
        shortest: Shortest training input; may be 0.
        longest: Longest training input, which also sets the test lengths.
    """

    name: ClassVar[str] = "instruct"

    def __init__(self, alphabet: int = 26, shortest: int = 0, longest: int = 50) -> None:
        check_lengths(self.name, shortest, longest, least=0)
        if longest < 1:
            raise ValueError(f"instruct needs a longest input of at least 1, got {longest}")
        own = Lengths(shortest, longest)
        super().__init__({"train": own, "iid": own} | length_buckets(*(longest * k for k in (1, 2, 4, 6, 8, 10))))
        plain = letters(alphabet)
        self.vocabulary = SPECIAL_SYMBOLS + OPERATIONS + plain + tuple(symbol + "*" for symbol in plain)
        self.alphabet = alphabet
        permutation = list(range(alphabet))
        random.Random(0).shuffle(permutation)
        self.permutation = tuple(permutation)
        self._on_device: dict[torch.device, Tensor] = {}

    def size(self, split: str) -> int:
        return 2 * self.lengths(split).longest + 4

    def draw(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch:
        lengths = self.lengths(split)
        width = lengths.longest
        n = draw_lengths(lengths, batch_size, generator, device)
        operation = torch.randint(len(OPERATIONS), (batch_size, 1), generator=generator, device=device)
        x = torch.randint(self.alphabet, (batch_size, width), generator=generator, device=device)
        chance = torch.rand((batch_size, width), generator=generator, device=device)
        marked = (operation == KEEP) & (chance < 0.5) & (torch.arange(width, device=device) < n)
        y, m = self._answer(operation, x, marked, n)

        place = torch.arange(self.size(split), device=device).expand(batch_size, -1)
        shown = x + self.alphabet * marked
        tokens = shown.gather(1, (place - 2).clamp(0, width - 1))
        answer = y.gather(1, (place - n - 3).clamp(0, width - 1))
        tokens = torch.where(place > n + 2, answer, tokens) + FIRST_SYMBOL
        tokens = torch.where(place == 0, BOS, tokens)
        tokens = torch.where(place == 1, operation + FIRST_ID, tokens)
        tokens = torch.where(place == n + 2, SEP, tokens)
        tokens = torch.where(place == n + m + 3, EOS, tokens)
        tokens = torch.where(place > n + m + 3, PAD, tokens)
        return next_symbol_batch(tokens, (place >= n + 2) & (place <= n + m + 2))

    def _answer(self, operation: Tensor, x: Tensor, marked: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs `[B, width]`, with arbitrary symbols after their end, and their lengths `[B, 1]`."""
        index = torch.arange(x.shape[1], device=x.device).expand_as(x)
        partner = torch.where((index ^ 1) < n, index ^ 1, index)
        sources = torch.stack(  # in the order of OPERATIONS
            [
                index,
                n - 1 - index,
                torch.zeros_like(index),
                (n - 1).expand_as(index),
                partner,
                index,
                torch.argsort(~marked, dim=1, stable=True),
            ]
        )
        chosen = sources.gather(0, operation.expand_as(x)[None])[0].clamp(0, x.shape[1] - 1)
        y = x.gather(1, chosen)
        y = torch.where(operation == MAP, self._permutation(x.device)[y], y)
        single = (operation == TAKE_FIRST) | (operation == TAKE_LAST)
        m = torch.where(single, n.clamp(max=1), n)
        return y, torch.where(operation == KEEP, marked.sum(1, keepdim=True), m)

    def _permutation(self, device: torch.device) -> Tensor:
        """Return the permutation on a device. It is copied once, since every copy would wait for the device."""
        if device not in self._on_device:
            self._on_device[device] = torch.tensor(self.permutation, device=device)
        return self._on_device[device]
