"""Which part of a shared sequence reads which keys, and when. `docs/context-parallel.md` says why in this order.

All ranks compute the same schedule from the same facts, so nothing but these facts has to be agreed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tra.ops.context.parts import SequenceParts

SMALLEST_SEGMENT = 1024
"""Keys that a part reads at a time where it has read few. Walks that end early end within the first of them."""


class Segment(NamedTuple):
    """Keys `start..stop - 1` of a part."""

    part: int
    start: int
    stop: int


class Task(NamedTuple):
    """Queries of a part that read keys of an older one."""

    part: int
    keys: Segment
    heads: tuple[int, ...]  # numbers among batch x key heads


class Schedule:
    """The tasks of all ranks, tick by tick: a rank's newer part walks first, then its older one, from new keys to old.

    Args:
        heads: Number of batch x key heads.
    """

    def __init__(self, parts: SequenceParts, heads: int) -> None:
        self.parts = parts
        self.segments = [segments_before(parts, part) for part in range(parts.number)]
        self.walking = [tuple(range(heads))] * parts.number  # heads that are not known to have ended
        self.position = [0] * parts.number

    def next_tasks(self) -> list[Task]:
        """Return the next tick's tasks, at most one of each rank. There are none after the end."""
        tasks = []
        for rank in range(self.parts.ranks):
            for part in reversed(self.parts.parts_of(rank)):
                if self.position[part] < len(self.segments[part]) and self.walking[part]:
                    tasks.append(Task(part, self.segments[part][self.position[part]], self.walking[part]))
                    self.position[part] += 1
                    break
        return tasks

    def learn(self, tasks: Sequence[Task], unfinished: Sequence[Sequence[int]]) -> None:
        """Take in what a tick has found: by rank, whether each head has to read on."""
        for task in tasks:
            flags = unfinished[self.parts.owner(task.part)]
            self.walking[task.part] = tuple(head for head in self.walking[task.part] if flags[head])


def segments_before(parts: SequenceParts, part: int) -> list[Segment]:
    """Return the keys older than a part, newest first: each segment half as long as all before, within a part."""
    found: list[Segment] = []
    read = 0
    for older in range(part - 1, -1, -1):
        stop = parts.size(older)
        while stop > 0:
            start = max(0, stop - max(SMALLEST_SEGMENT, read // 2))
            found.append(Segment(older, start, stop))
            read += stop - start
            stop = start
    return found
