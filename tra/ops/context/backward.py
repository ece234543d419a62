"""The backward walk over a shared sequence: repeat the forward's steps, and send gradients to the owners of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tra.ops.blockwise import RowSums, RunningSoftmax
from tra.ops.context.pieces import Pieces
from tra.ops.context.shared_keys import SharedKeys, Step, Tick
from tra.ops.context.transport import Message


class BackwardWalk:
    """The gradients of a call.

    Args:
        found: The softmax state of the rows of each part.
        steps: The steps that the forward did on this process.
        ticks: The ticks in which it did them.
    """

    def __init__(
        self,
        shared: SharedKeys,
        pieces: type[Pieces],
        found: dict[int, RunningSoftmax],
        steps: Sequence[Step],
        ticks: Sequence[Tick],
    ) -> None:
        self.shared, self.pieces, self.found, self.steps, self.ticks = shared, pieces, found, steps, ticks
        wide = next(iter(found.values())).total.dtype

        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(like.shape, dtype=wide, device=like.device)

        self.grad_query = {part: zeros(own.query) for part, own in shared.own.items()}
        self.grad_keys = {part: zeros(own.keys) for part, own in shared.own.items()}
        self.grad_forget = {part: zeros(own.log_forget) for part, own in shared.own.items()}
        self.sums = {part: RowSums(zeros(own.log_forget), zeros(own.log_forget)) for part, own in shared.own.items()}

    def run(self, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of query, key, value and log_forget, `[B, heads, T, ...]`."""
        slices = self.shared.parts.own_slices()
        self.grad_out = {part: self.shared.by_head(grad_out[:, :, slices[part]]).contiguous() for part in slices}
        steps = iter(self.steps)
        waits = [self.shared.exchange(tick) for tick in self.ticks[:1]]
        for part in self.shared.own:
            self.grad_keys[part] += self._differentiate(next(steps), None)
        add_gradients: Callable[[], None] | None = None
        for number, tick in enumerate(self.ticks):
            received = waits.pop()()
            waits += [self.shared.exchange(tick) for tick in self.ticks[number + 1 : number + 2]]
            grad = None if tick.mine is None else self._differentiate(next(steps), received).to(self.shared.dtype)
            if add_gradients is not None:
                add_gradients()
            add_gradients = self._return_gradients(tick, grad)
        if add_gradients is not None:
            add_gradients()
        return self._join()

    def _differentiate(self, step: Step, keys: Tensor | None) -> Tensor:
        """Add the gradients of a step's rows, and return those of its keys, `[h, K, D + Dv]`."""
        piece, heads = self.shared.piece_inputs(step.part, step.task, keys)
        highest, total, _, out = (x[heads] for x in self.found[step.part])
        rows = RunningSoftmax(highest, total, step.counted_right, out)
        (grad_query, grad_key, grad_value, grad_forget), sums = self.pieces.backward(
            self.grad_out[step.part][heads], piece, rows, step.stops, self.shared.options
        )
        if sums is not None:
            self.sums[step.part].grad_scores[heads] += sums.grad_scores
            self.sums[step.part].distances[heads] += sums.distances
        self.grad_query[step.part][heads] += grad_query
        self.grad_forget[step.part][heads] += grad_forget
        return torch.cat([grad_key, grad_value], dim=-1)[:, 0]

    def _return_gradients(self, tick: Tick, grad: Tensor | None) -> Callable[[], None]:
        """Send the gradients of a tick's keys to their owner. Return a function that waits for those of own keys.

        That function adds them in the order of ticks and, within a tick, of tasks, so that every run has the same sums.
        """
        rank, owner = self.shared.parts.rank, self.shared.parts.owner
        sends, receives, of_served = [], [], []
        if tick.mine is not None and owner(tick.mine.keys.part) != rank:
            assert grad is not None
            sends.append(Message(grad.contiguous(), owner(tick.mine.keys.part)))
        for task in tick.served:
            if owner(task.part) == rank:
                assert grad is not None
                of_served.append(grad)
            else:
                of_served.append(self.shared.empty_keys(task))
                receives.append(Message(of_served[-1], owner(task.part)))
        done = self.shared.parts.transport.exchange(sends, receives)

        def add() -> None:
            done()
            for task, part_grad in zip(tick.served, of_served, strict=True):
                keys = self.grad_keys[task.keys.part][:, task.keys.start : task.keys.stop]
                keys[self.shared.index(task.heads)] += part_grad

        return add

    def _join(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad_keys = []
        for part, own in self.shared.own.items():
            grad = self.grad_keys[part]
            if own.order is not None:  # restore the order from before masked keys were moved
                grad = torch.zeros_like(grad).scatter_(1, own.order[..., None].expand_as(grad), grad)
            grad_keys.append(grad[:, None])
        grad_key, grad_value = self.shared.split(self.shared.join(grad_keys))
        for part, sums in self.sums.items():  # Σ dS should be 0; its error is also in Σ dS n, times the mean of n
            self.grad_forget[part] -= sums.grad_scores * sums.distances
        grad_query = self.shared.join(list(self.grad_query.values()))
        dtype = self.shared.dtype
        return (
            grad_query.to(dtype),
            grad_key.to(dtype),
            grad_value.to(dtype),
            self.shared.join(list(self.grad_forget.values())),
        )
