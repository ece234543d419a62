"""Latest: the value last stored under a key, through any amount of noise.

    <bos> k1 v3 . v9 k0 v5 k1 v8 . v2 <sep> k1 v8 k0 v5
          └ store └ noise   └ k1's latest      │  └ the answer: loss and score are on it
                                               └ a question

Every key is stored at least once and asked for once. The task needs content (only entries of the asked key matter) and
order (only the latest of these matters). It is made to compare distances. The number of stores is always the same, but
tests have up to 256 times as much noise as training. A distance that counts only relevant keys is the same in both.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from tra.tasks.base import Batch, Lengths, Task, next_symbol_batch
from tra.tasks.symbols import BOS, FIRST_ID, MAX_SYMBOLS, PAD, SEP, SPECIAL_SYMBOLS

BLANK = FIRST_ID


class Latest(Task):
    """Splits: `train` and `iid`, with up to `noise` entries of noise, then `4x`, `16x`, `64x` and `256x` as much.

    Args:
        noise: Largest number of noise entries in training.
        stores: Entries that store a value.
        keys: Number of keys.
        values: Number of values.
    """

    name: ClassVar[str] = "latest"

    def __init__(self, noise: int = 16, stores: int = 16, keys: int = 4, values: int = 16) -> None:
        if noise < 1 or not 1 <= keys <= stores or values < 2:
            raise ValueError(
                "latest needs noise >= 1, 1 <= keys <= stores and values >= 2, "
                f"got noise {noise}, {keys} keys, {stores} stores and {values} values"
            )
        if max(stores, keys + values) > MAX_SYMBOLS:
            raise ValueError(f"latest has at most {MAX_SYMBOLS:,} stores, keys and values")
        trained = {split: Lengths(0, noise) for split in ("train", "iid")}
        super().__init__(trained | {f"{by}x": Lengths(noise * by, noise * by) for by in (4, 16, 64, 256)})
        self.stores, self.keys, self.values = stores, keys, values
        self.vocabulary = (
            *SPECIAL_SYMBOLS, ".", *(f"k{i}" for i in range(keys)), *(f"v{i}" for i in range(values)),
        )  # fmt: skip

    def size(self, split: str) -> int:
        return 2 * (1 + self.stores + self.lengths(split).longest + self.keys)

    def draw(self, split: str, batch_size: int, generator: torch.Generator, device: torch.device) -> Batch:
        noise, stores, keys = self.lengths(split), self.stores, self.keys

        def random(*shape: int) -> torch.Tensor:
            return torch.rand((batch_size, *shape), generator=generator, device=device)

        def integers(below: int, count: int) -> torch.Tensor:
            return torch.randint(below, (batch_size, count), generator=generator, device=device)

        entries = stores + noise.shortest + integers(noise.longest - noise.shortest + 1, 1)  # [B, 1]
        most = stores + noise.longest
        order = random(most).masked_fill(torch.arange(most, device=device) >= entries, -1.0)
        stored_at = order.topk(stores).indices.sort().values  # [B, stores]
        every_key = torch.arange(keys, device=device).expand(batch_size, -1)
        stored_key = torch.cat([every_key, integers(keys, stores - keys)], 1).gather(1, random(stores).argsort())
        first_value = BLANK + 1 + keys
        value = integers(self.values, most) + first_value
        key = torch.full_like(value, BLANK).scatter(1, stored_at, stored_key + BLANK + 1)

        asked = random(keys).argsort()
        number = torch.arange(1, stores + 1, device=device)
        latest = ((stored_key[:, None] == asked[..., None]) * number).argmax(2)  # [B, keys]
        answer = value.gather(1, stored_at.gather(1, latest))

        body = torch.stack([key, value], -1).flatten(1)
        questions = torch.stack([asked + BLANK + 1, answer], -1).flatten(1)
        place = torch.arange(self.size(split), device=device).expand(batch_size, -1)
        separator = 1 + 2 * entries
        tokens = body.gather(1, (place - 1).clamp(0, 2 * most - 1))
        tokens = torch.where(place == 0, BOS, tokens)
        tokens = torch.where(place == separator, SEP, tokens)
        since = place - separator - 1
        tokens = torch.where(since >= 0, questions.gather(1, since.clamp(0, 2 * keys - 1)), tokens)
        tokens = torch.where(since >= 2 * keys, PAD, tokens)
        return next_symbol_batch(tokens, (since >= 0) & (since < 2 * keys) & (since % 2 == 0))
