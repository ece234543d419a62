"""The operator on a CPU: the blockwise walk against the plain definition, time and peak memory.

Peak memory is that of a fresh process (`ru_maxrss`), less what the process and its inputs take beforehand.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tra
from tra.runs import environment
from tra.runs.processes import python_command


@dataclass(frozen=True)
class Measurement:
    """One implementation at one length, forward and backward."""

    impl: str
    length: int
    heads: int
    width: int
    forward_ms: float
    """Median over the repeats."""
    backward_ms: float
    peak_mib: float
    """Above what the inputs take."""

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


REFERENCE_LENGTH, WALK_LENGTH = 4096, 16_384
"""Tokens of the comparison with the reference, and of the walk alone."""


def inputs_at_initialisation(length: int, heads: int, width: int) -> tuple[Tensor, ...]:
    """Normalised random queries and keys, so half of the keys are kept; δ = log σ(N(0, 1))."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, heads, length, *shape, generator=generator)

    query, key = (F.rms_norm(draw(width), (width,)) for _ in range(2))
    return tuple(x.requires_grad_() for x in (query, key, draw(width), F.logsigmoid(draw())))


def measure(impl: str, length: int, heads: int = 4, width: int = 64, repeats: int = 3) -> Measurement:
    """Measure in this process. Peak memory is only meaningful in a process that did nothing else."""
    query, key, value, log_forget = inputs_at_initialisation(length, heads, width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forward, backward = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        out = tra.threshold_relative_attention(query, key, value, log_forget, impl=impl)
        middle = time.perf_counter()
        out.backward(torch.ones_like(out))
        forward.append(1e3 * (middle - start))
        backward.append(1e3 * (time.perf_counter() - middle))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    unit = 1024 if platform.system() == "Linux" else 1024**2  # kilobytes on Linux, bytes on macOS
    return Measurement(impl, length, heads, width, statistics.median(forward), statistics.median(backward), peak / unit)


def measure_apart(impl: str, length: int, **options: int) -> Measurement:
    """Call `measure` in a process of its own."""
    call = f"measure({impl!r}, {length}, **{options!r})"
    code = f"import json, dataclasses; from tra.bench.op import measure; print(json.dumps(dataclasses.asdict({call})))"
    done = subprocess.run(python_command("-c", code), check=True, capture_output=True, text=True)
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def bench_op(progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure the walk and the definition where both fit in memory, and the walk alone where only it does."""
    rows = []
    for impl, length, repeats in (
        ("reference", REFERENCE_LENGTH, 2),
        ("blockwise", REFERENCE_LENGTH, 3),
        ("blockwise", WALK_LENGTH, 1),
    ):
        progress(f"{impl} at {length:,}")
        rows.append(measure_apart(impl, length, repeats=repeats))
    reference, walk, long = rows
    square_mib = WALK_LENGTH**2 * 4 / 1024**2
    return {
        "environment": environment(torch.device("cpu")),
        "rows": [asdict(row) for row in rows],
        "speedup": reference.total_ms / walk.total_ms,
        "memory_of_one_map_mib": square_mib,
        "memory_ratio": long.peak_mib / square_mib,
    }
