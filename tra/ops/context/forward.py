"""The forward walk over a shared sequence. Each part reads its own keys, then older keys while these can count."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tra.ops.blockwise import RunningSoftmax
from tra.ops.context.pieces import PieceInputs, Pieces, merge
from tra.ops.context.schedule import Schedule, Segment, Task
from tra.ops.context.shared_keys import SharedKeys, Step, Tick
from tra.ops.stop_bound import OlderKeys, euclidean_norms, key_bounds, log_remaining_weight, score_factor


class ForwardWalk:
    """The forward of a call. `run` leaves the state of each part's rows in `found`, and its `steps` and `ticks`."""

    def __init__(self, shared: SharedKeys, pieces: type[Pieces]) -> None:
        self.shared, self.pieces, self.options = shared, pieces, shared.options
        self.parts, self.transport = shared.parts, shared.parts.transport
        self.early = self.options.tolerance > 0
        self.found: dict[int, RunningSoftmax] = {}
        self.steps: list[Step] = []
        self.ticks: list[Tick] = []
        self._share_facts()

    def run(self) -> None:
        """Walk in lockstep with the other ranks.

        The keys of the next tick are requested before a tick is computed. Which keys these are depends on the results
        of two ticks before, which the device has finished by then, so that nothing waits.
        """
        schedule = Schedule(self.parts, self.shared.heads)
        tasks = schedule.next_tasks()
        wait = self._begin(tasks)
        for part in self.shared.own:
            self._attend(part, None, None)
        results: list[tuple[list[Task], Callable[[], Tensor]]] = []
        while tasks:
            tick, received = self.ticks[-1], wait()
            if len(results) > 1:
                past, flags = results.pop(0)
                schedule.learn(past, flags().tolist())
            upcoming = schedule.next_tasks()
            if upcoming:
                wait = self._begin(upcoming)
            unfinished = torch.zeros(self.shared.heads, dtype=torch.uint8, device=self.shared.device)
            if tick.mine is not None:
                unfinished = self._attend(tick.mine.part, tick.mine, received)
            if self.early:
                results.append((tasks, self.transport.all_gather(unfinished)))
            tasks = upcoming
        for _, flags in results:  # wait until nothing is in flight
            flags()

    def _begin(self, tasks: list[Task]) -> Callable[[], Tensor | None]:
        """Request the keys of a tick. Return a function that waits for them."""
        self.ticks.append(self.shared.tick(tasks))
        return self.shared.exchange(self.ticks[-1])

    def _share_facts(self) -> None:
        """Tell all ranks how many keys each part has, and the bound on scores with these keys."""
        facts = []
        for own in self.shared.own.values():
            largest = torch.zeros(self.shared.heads, dtype=torch.float64, device=self.shared.device)
            if self.early:
                largest = key_bounds(*self.shared.split(own.keys), self.options.score_bound).amax(-1)
            facts.append(torch.stack([largest, own.n_real.double()]))
        gathered = self.transport.all_gather(torch.stack(facts))()  # [ranks, 2 parts, 2 facts, n]
        by_part = torch.cat([gathered[:, 0], gathered[:, 1].flip(0)])  # [parts, 2 facts, n]
        self.largest = by_part[:, 0].cummax(0).values  # over the parts up to each part
        self.shared.n_real = by_part[:, 1].long()
        self.n_older = self.shared.n_real.cumsum(0) - self.shared.n_real  # over the parts before each part

    def _attend(self, part: int, task: Task | None, keys: Tensor | None) -> Tensor:
        """Attend from the rows of a part to keys. Return which heads have to read older keys, `[n]` uint8."""
        piece, heads = self.shared.piece_inputs(part, task, keys)
        segment = Segment(part, 0, self.parts.size(part)) if task is None else task.keys
        older = OlderKeys(self.parts.starts[segment.part] + segment.start, self.largest[segment.part][heads])
        result = self.pieces.forward(piece, self.options, older)
        if task is None:
            counted_right, rows = torch.zeros_like(result.rows.counted_keys), result.rows
            self.found[part] = rows
        else:
            before = RunningSoftmax(*(x[heads] for x in self.found[part]))
            counted_right, rows = before.counted_keys.clone(), merge(before, result.rows, piece.log_forget)
            for whole, new in zip(self.found[part], rows, strict=True):
                whole[heads] = new
        self.steps.append(Step(part, task, counted_right, result.stops))
        unfinished = torch.zeros(self.shared.heads, dtype=torch.uint8, device=self.shared.device)
        if self.early:
            done = result.stopped | self._rest_is_negligible(part, piece, heads, rows, segment)
            unfinished[heads] = (~done.flatten(1).all(-1)).to(torch.uint8)
        return unfinished

    def _rest_is_negligible(
        self, part: int, piece: PieceInputs, heads: Tensor | slice, rows: RunningSoftmax, segment: Segment
    ) -> Tensor:
        """Return for which rows `[h, G, R]` of a part no key older than a segment counts, by `stop_bound.py`."""
        newest_left = segment.part if segment.start > 0 else segment.part - 1
        if newest_left < 0:
            return torch.ones_like(rows.total, dtype=torch.bool)
        keys_left = (segment.start - self.shared.n_masked(segment.part)).clamp(min=0) + self.n_older[segment.part]
        keys_left = keys_left[heads][:, None, None]
        begins = self.shared.own[part].begins
        if begins is not None:  # further documents don't count
            keys_left = (self.shared.place(segment) - begins[heads, None]).clamp(min=0)
        keys_left = keys_left.to(rows.total.dtype).expand_as(rows.total)
        largest = self.largest[newest_left][heads][:, None, None]
        if self.options.score_bound is None:
            factor = score_factor(self.shared.width, rows.total.dtype, self.shared.device, self.options.scale)
            largest = euclidean_norms(piece.query) * largest * factor
        margin_threshold = self.options.threshold if self.options.has_margin else None
        bound = log_remaining_weight(
            piece.log_forget,
            rows.counted_keys,
            keys_left,
            largest.to(rows.total.dtype).expand_as(rows.total),
            margin_threshold,
        )
        if self.pieces.has_distances_less_one(piece.query, self.options):
            bound = bound - piece.log_forget
        return (keys_left == 0) | (bound - rows.highest - rows.total.log() < math.log(self.options.tolerance))
