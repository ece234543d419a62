"""Tasks, one file each with a worked example in its docstring, and the parts to write your own.

A task of your own is a subclass of `Task`, such as `examples/own_task.py`. `tra.import_file` registers the tasks of a
file.
"""

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
from tra.tasks.symbols import BOS, EOS, FIRST_ID, PAD, SEP, SPECIAL_SYMBOLS, letters

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (FlipFlop, Copy, Induct, Instruct, Latest, MultiQueryRecall)
}
"""Tasks by name. Your own are added by `tra.import_file`, or when a config first names them."""

BUILT_IN_TASKS = tuple(TASKS)
"""Names of the tasks that come with this package."""

__all__ = [
    "BOS",
    "BUILT_IN_TASKS",
    "EOS",
    "FIRST_ID",
    "PAD",
    "SEP",
    "SPECIAL_SYMBOLS",
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
