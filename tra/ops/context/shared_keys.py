"""Hold this process's parts of a shared sequence, and exchange keys between their owners and their readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.context.parts import SequenceParts
from tra.ops.context.pieces import PieceInputs
from tra.ops.context.schedule import Segment, Task
from tra.ops.context.transport import Message
from tra.ops.options import AttentionOptions


class OwnPart(NamedTuple):
    """A part of this process. n is batch x key heads, G the query heads of a key head, R the tokens."""

    query: Tensor  # [n, G, R, D]
    log_forget: Tensor  # [n, G, R]
    keys: Tensor  # [n, R, D + Dv]: keys beside their values; if there is a mask, real keys at the end
    order: Tensor | None  # [n, R]: each key's place before masked keys were moved, if there is a mask
    first: Tensor | None  # [n, R]: the keys of this part that a row sees, if there is a mask
    last: Tensor | None
    n_real: Tensor  # [n]: keys that aren't masked
    begins: Tensor | None  # [n, R]: the first key of the whole sequence that a row sees, if there are documents


class Step(NamedTuple):
    """A step of the forward for rows of a part, which backward repeats."""

    part: int
    task: Task | None  # None: the part's own keys
    counted_right: Tensor  # [h, G, R]: counted keys right of those read, for the task's heads
    stops: Tensor  # where the walks stopped, in the implementation's form


class Tick(NamedTuple):
    """The tasks of this process at one time."""

    mine: Task | None
    served: list[Task]  # tasks, of any rank, that read this process's keys


class SharedKeys:
    """The inputs of one call on this process, by part and key head."""

    n_real: Tensor  # [parts, n]: keys of all parts that aren't masked; filled by the forward

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_forget: Tensor,
        key_mask: Tensor | None,
        parts: SequenceParts,
        options: AttentionOptions,
    ) -> None:
        self.parts, self.options = parts, options
        self.kv_heads, self.width = key.shape[1], key.shape[3]
        self.heads = key.shape[0] * key.shape[1]
        self.dtype, self.device = query.dtype, query.device
        self.row_width = key.shape[3] + value.shape[3]
        self.own: dict[int, OwnPart] = {}
        begins = None
        if parts.document_starts is not None:
            begins = parts.document_starts.repeat_interleave(self.kv_heads, dim=0)
        for part, rows in parts.own_slices().items():
            both = torch.cat([key[:, :, rows], value[:, :, rows]], dim=-1)
            mask = None if key_mask is None else key_mask[:, rows].repeat_interleave(self.kv_heads, dim=0)
            self.own[part] = _own_part(
                self.by_head(query[:, :, rows]), self.by_head(log_forget[:, :, rows]), self.by_head(both), mask
            )
            if begins is not None:
                self.own[part] = _of_documents(self.own[part], begins[:, rows], parts.starts[part])

    def by_head(self, x: Tensor) -> Tensor:
        """Return `[B, heads, T, ...]` as `[n, G, T, ...]`."""
        return x.unflatten(1, (self.kv_heads, -1)).flatten(0, 1)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors `[n, G, R, ...]` of this process's parts as `[B, heads, T, ...]`."""
        return torch.cat([x.unflatten(0, (-1, self.kv_heads)).flatten(1, 2) for x in tensors], dim=2)

    def split(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of `[..., D + Dv]`."""
        return keys[..., : self.width], keys[..., self.width :]

    def index(self, heads: tuple[int, ...]) -> Tensor | slice:
        """Return an index that selects heads."""
        return slice(None) if len(heads) == self.heads else torch.tensor(heads, device=self.device)

    def tick(self, tasks: Sequence[Task]) -> Tick:
        """Return what this process does for the tasks of all ranks."""
        rank, owner = self.parts.rank, self.parts.owner
        mine = next((task for task in tasks if owner(task.part) == rank), None)
        return Tick(mine, [task for task in tasks if owner(task.keys.part) == rank])

    def exchange(self, tick: Tick) -> Callable[[], Tensor | None]:
        """Send and request the keys of a tick. Return a function that waits for the keys of this process's task."""
        rank, owner = self.parts.rank, self.parts.owner
        sends = [Message(self._own_keys(task), owner(task.part)) for task in tick.served if owner(task.part) != rank]
        receives: list[Message] = []
        received: Tensor | None = None
        if tick.mine is not None and owner(tick.mine.keys.part) == rank:
            received = self._own_keys(tick.mine)
        elif tick.mine is not None:
            received = self.empty_keys(tick.mine)
            receives.append(Message(received, owner(tick.mine.keys.part)))
        done = self.parts.transport.exchange(sends, receives)

        def wait() -> Tensor | None:
            done()
            return received

        return wait

    def empty_keys(self, task: Task) -> Tensor:
        """Return an empty tensor for the keys of a task, or for their gradients, `[h, K, D + Dv]`."""
        shape = (len(task.heads), task.keys.stop - task.keys.start, self.row_width)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _own_keys(self, task: Task) -> Tensor:
        keys = self.own[task.keys.part].keys[:, task.keys.start : task.keys.stop]
        return keys[self.index(task.heads)].contiguous()

    def piece_inputs(self, part: int, task: Task | None, keys: Tensor | None) -> tuple[PieceInputs, Tensor | slice]:
        """Return rows with the keys of a task, or of their own part, and an index that selects the rows' heads."""
        own = self.own[part]
        if task is None or keys is None:
            key, value = self.split(own.keys[:, None])
            return PieceInputs(own.query, key, value, own.log_forget, own.first, own.last), slice(None)
        heads = self.index(task.heads)
        key, value = self.split(keys[:, None])
        n_keys, shape = task.keys.stop - task.keys.start, (len(task.heads), own.query.shape[2])
        if own.begins is None:
            first = (self.n_masked(task.keys.part)[heads, None] - task.keys.start).expand(shape)
        else:
            first = own.begins[heads] - self.place(task.keys)
        last = torch.full(shape, n_keys - 1, device=self.device)
        inputs = PieceInputs(own.query[heads], key, value, own.log_forget[heads], first.clamp(0, n_keys), last)
        return inputs, heads

    def place(self, keys: Segment) -> int:
        """Return the number of a segment's first key in the whole sequence."""
        return self.parts.starts[keys.part] + keys.start

    def n_masked(self, part: int) -> Tensor:
        """Return the number of masked keys of a part, `[n]`, which come before the real keys."""
        return self.parts.size(part) - self.n_real[part]


def _own_part(query: Tensor, log_forget: Tensor, keys: Tensor, key_mask: Tensor | None) -> OwnPart:
    """Return a part with its real keys moved to the end, in order. `keys` is `[n, 1, R, D + Dv]`."""
    keys, length = keys[:, 0], query.shape[2]
    if key_mask is None:
        n_real = torch.full((len(keys),), length, device=keys.device)
        return OwnPart(query, log_forget, keys, None, None, None, n_real, None)
    order = torch.argsort(key_mask, dim=-1, stable=True)
    moved = keys.gather(1, order[..., None].expand_as(keys))
    keys = torch.where(key_mask.gather(1, order)[..., None], moved, 0.0)
    n_real = key_mask.sum(-1)
    first = (length - n_real)[:, None].expand(-1, length)
    return OwnPart(query, log_forget, keys, order, first, first + key_mask.cumsum(-1) - 1, n_real, None)


def _of_documents(own: OwnPart, begins: Tensor, start: int) -> OwnPart:
    """Let each row of a part that begins at `start` see keys from its document's first on, `begins` `[n, R]`."""
    last = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
    return own._replace(first=(begins - start).clamp(min=0), last=last, begins=begins)
