"""List the kernels of a training step on a GPU: `python -m benchmarks.step_kernels MECHANISM SHAPE`.

SHAPE is 0, 1 or 2: mini, medium, and medium with GPT-2's vocabulary, as in `tra bench step`. For each kernel
it prints the microseconds in a step, the runs in a step, and the name. Numbers are medians over nine steps, so that
another process on the GPU changes little. The log is `results/bench/step-kernels.txt`.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from tra.bench.step import SHAPES, run_config
from tra.runs import RunFolder
from tra.training import Trainer

STEPS, SHOWN = 9, 30


def kernel_times(call: Callable[[], object], number: int) -> dict[str, list[float]]:
    """Microseconds of every kernel of `number` calls, by name."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(number):
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiled.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time)
    return times


def main(mechanism: str, shape: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(run_config(mechanism, SHAPES[shape]), RunFolder(Path(folder)), torch.device("cuda"))
        batch = trainer.next_batch()
        trainer.optimise(batch)
        times = kernel_times(lambda: trainer.optimise(batch), STEPS)
    rows = sorted(((median(t) * len(t) / STEPS, len(t) / STEPS, name) for name, t in times.items()), reverse=True)
    print(f"{mechanism}, {SHAPES[shape]}: {sum(row[0] for row in rows):.0f} us in kernels")
    for microseconds, number, name in rows[:SHOWN]:
        print(f"{microseconds:9.1f} us {number:6.1f}x  {name[:110]}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
