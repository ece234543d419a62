"""Time and memory on a device, and what it was measured with."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tra.runs import environment


class Measured(NamedTuple):
    ms: float
    fastest_ms: float
    slowest_ms: float
    peak_mib: int


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_graph(call: Callable[[], object], rounds: int = 7) -> Measured:
    """Return the times of a CUDA graph of one call, and the peak memory of the call outside of a graph."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = [milliseconds(graph.replay) for _ in range(rounds)]
    median, fastest, slowest = (round(x, 4) for x in (statistics.median(times), min(times), max(times)))
    return Measured(median, fastest, slowest, round(peak / 2**20))


def measure_eager(call: Callable[[], object]) -> float:
    """Return the median milliseconds of one of several calls in a row, without a CUDA graph.

    This is the host's time or the GPU's, whichever is longer.
    """
    calls, times = 10, []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun) / calls)
    return round(statistics.median(times), 4)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the time of a call on the current GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def gpu_environment(device: torch.device) -> dict[str, Any]:
    """Return the environment of a result, with Triton's version."""
    import triton

    return environment(device) | {"triton": str(triton.__version__)}


def row_or_error(facts: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a row of facts and what was measured; where that fails, the start of its error in place of numbers."""
    try:
        return facts | measure()
    except (RuntimeError, ValueError) as error:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return facts | {"error": str(error).splitlines()[0][:120]}


def gpu_clocks() -> str | None:
    """Return SM and memory clock, power and driver version, as the driver reports them."""
    query = "clocks.sm,clocks.mem,power.draw,driver_version"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
