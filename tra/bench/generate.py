"""Generation from end to end: a prompt read into a static cache, then token after token, with a CUDA graph and without.

Weights are random, and in bfloat16 on a GPU. Random gates forget after some 37 kept keys, so TRA's steps don't feel the
length of a prompt; `benchmarks/decode_trained.py` has the heads of a trained model.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tra.bench.timing import row_or_error, wait_for
from tra.generation import continuation
from tra.model import Decoder, DecoderConfig
from tra.runs import environment


class Plan(NamedTuple):
    """The model, prompts and repetitions that are measured."""

    size: str
    vocabulary: int
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    """Tokens of a prompt."""
    new: int
    """New tokens."""
    dtype: torch.dtype
    graphs: tuple[bool, ...]
    rounds: int


ON_GPU = Plan("medium", 50_304, (1, 32), (128, 4096, 16_384), 128, torch.bfloat16, (True, False), 3)
"""GPT-2's vocabulary, rounded up to a multiple of 64."""
ON_CPU = Plan("tiny", 256, (1, 2), (16, 64), 8, torch.float32, (False,), 1)


def measure_generation(
    model: Decoder, batch: int, prompt: int, new: int, graph: bool, device: torch.device, rounds: int
) -> dict[str, float]:
    """Return medians over rounds, after a first round that warms up.

    Returns:
        `prefill_ms`: until the first token is there; `step_ms`: of a later token, over the second half, when a graph
        has been captured; `tokens_per_second`: of all rows from end to end, prompt and capture included; `peak_mib`.
    """
    draws = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (batch, prompt), device=device, generator=draws)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found: list[tuple[float, float, float]] = []
    for _ in range(rounds + 1):
        wait_for(device)
        times = [time.perf_counter()]
        for place, _column in enumerate(continuation(model, tokens, new, capacity="static", graph=graph)):
            if place in (0, new // 2, new - 1):
                wait_for(device)
                times.append(time.perf_counter())
        begun, first, half, end = times
        found.append((1e3 * (first - begun), 1e3 * (end - half) / (new - 1 - new // 2), batch * new / (end - begun)))
    prefill, step, speed = (statistics.median(values) for values in zip(*found[1:], strict=True))
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return {
        "prefill_ms": round(prefill, 3),
        "step_ms": round(step, 4),
        "tokens_per_second": round(speed, 1),
        **({} if peak is None else {"peak_mib": round(peak)}),
    }


def bench_generate(
    device: torch.device,
    mechanisms: Sequence[str] = ("tra", "rope"),
    plan: Plan | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure the medium decoder on a GPU; on a CPU a tiny one, so that there is something to see.

    A row per mechanism, batch, prompt, and with or without a graph; where one fails, its error in place of numbers.
    """
    plan = plan or (ON_GPU if device.type == "cuda" else ON_CPU)
    rows: list[dict[str, Any]] = []
    for mechanism in mechanisms:
        torch.manual_seed(0)
        config = getattr(DecoderConfig, plan.size)(plan.vocabulary, mechanism=mechanism)
        model = Decoder(config).to(device, plan.dtype).eval()
        for batch, prompt, graph in itertools.product(plan.batches, plan.prompts, plan.graphs):
            progress(f"{mechanism}, {batch} × {prompt:,} tokens{', graph' if graph else ''}")
            case: dict[str, Any] = {"batch": batch, "prompt": prompt, "new": plan.new, "graph": graph}
            measure = partial(measure_generation, model, **case, device=device, rounds=plan.rounds)
            rows.append(row_or_error({"mechanism": mechanism, "size": plan.size, **case}, measure))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    weights = f"random, {str(plan.dtype).removeprefix('torch.')}"
    return {"environment": environment(device), "weights": weights, "vocabulary": plan.vocabulary, "rows": rows}
