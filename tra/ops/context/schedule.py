"""Schedule which part of a shared sequence reads which keys, and when. `docs/context-parallel.md` explains the order.

All ranks compute the same schedule from the same facts, so they exchange only these facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tra.ops.context.parts import SequenceParts

SMALLEST_SEGMENT = 1024
"""Keys of a part's first segments, before segments grow. Most walks that end early end within these."""


class Segment(NamedTuple):
    """Keys `start..stop - 1` of a part."""

    part: int
    start: int
    stop: int


class Task(NamedTuple):
    """Queries of a part that read keys of an older one."""

    part: int
    keys: Segment
    heads: tuple[int, ...]  # indices into batch x key heads


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
        """Return the tasks of the next tick, at most one per rank; an empty list at the end."""
        tasks = []
        for rank in range(self.parts.ranks):
            for part in reversed(self.parts.parts_of(rank)):
                if self.position[part] < len(self.segments[part]) and self.walking[part]:
                    tasks.append(Task(part, self.segments[part][self.position[part]], self.walking[part]))
                    self.position[part] += 1
                    break
        return tasks

    def learn(self, tasks: Sequence[Task], unfinished: Sequence[Sequence[int]]) -> None:
        """Record the result of a tick: for each rank, whether each head has to read on."""
        for task in tasks:
            flags = unfinished[self.parts.owner(task.part)]
            self.walking[task.part] = tuple(head for head in self.walking[task.part] if flags[head])


def segments_before(parts: SequenceParts, part: int) -> list[Segment]:
    """Return the keys older than a part in segments, newest first. Each lies in one part; later segments are longer."""
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
