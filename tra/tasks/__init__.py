"""What is learnt: a task per file, with a worked example in its docstring, and the parts to write your own."""

from tra.tasks.base import (
    Batch,
    Lengths,
    Task,
    check_lengths,
    draw_lengths,
    generator,
    length_buckets,
    length_splits,
    next_symbol_batch,
    stream_seed,
)
from tra.tasks.copy import Copy
from tra.tasks.flipflop import FlipFlop
from tra.tasks.induct import Induct
from tra.tasks.instruct import Instruct
from tra.tasks.latest import Latest
from tra.tasks.mqar import MultiQueryRecall
from tra.tasks.symbols import letters

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (FlipFlop, Copy, Induct, Instruct, Latest, MultiQueryRecall)
}
"""Tasks by name."""

__all__ = [
    "TASKS",
    "Batch",
    "Copy",
    "FlipFlop",
    "Induct",
    "Instruct",
    "Latest",
    "Lengths",
    "MultiQueryRecall",
    "Task",
    "check_lengths",
    "draw_lengths",
    "generator",
    "length_buckets",
    "length_splits",
    "letters",
    "next_symbol_batch",
    "stream_seed",
]
