"""What is learnt. Each task shows a worked example in its docstring."""

from tra.tasks._base import Batch, Lengths, Task, generator, stream_seed
from tra.tasks.copy import Copy
from tra.tasks.flipflop import FlipFlop
from tra.tasks.induct import Induct
from tra.tasks.instruct import Instruct
from tra.tasks.mqar import MultiQueryRecall

TASKS: dict[str, type[Task]] = {task.name: task for task in (FlipFlop, Copy, Induct, Instruct, MultiQueryRecall)}

__all__ = [
    "TASKS",
    "Batch",
    "Copy",
    "FlipFlop",
    "Induct",
    "Instruct",
    "Lengths",
    "MultiQueryRecall",
    "Task",
    "generator",
    "stream_seed",
]
