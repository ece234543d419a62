"""Measure what a call costs the host: wall time of the operator, a layer and a small decoder, with PyTorch and RoPE.

On a GPU, nothing waits for results: a call ends when its kernels are in the queue. Shapes are small, so the queue is
never full. Without a CUDA graph, small models and single tokens can't be faster than this. A CPU has no queue, so the
time there is that of the whole call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tra
from tra.attention import MECHANISMS
from tra.bench.inputs import HEADS, Case
from tra.bench.timing import wait_for
from tra.model import Decoder, DecoderConfig
from tra.runs import environment

WIDTH, VOCABULARY = 64, 256
"""Width of a head, and tokens of the decoder's vocabulary."""


class Plan(NamedTuple):
    """How much is measured."""

    length: int = 128
    calls: int = 5
    """Calls in a round. A GPU's queue holds about a thousand kernels."""
    rounds: int = 61
    warm_up: int = 20


class Measured(NamedTuple):
    """A call to measure."""

    what: str
    contender: str
    call: Callable[[], object]


def bench_host(
    device: torch.device, progress: Callable[[str], None] = lambda _: None, plan: Plan | None = None
) -> dict[str, Any]:
    """Return a row for each case and contender: the median of rounds in µs, and its ratio to PyTorch's or RoPE's.

    Rounds of the contenders alternate, so that other load on the machine affects all of them alike.
    """
    plan = plan or Plan()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for cases in (operator_cases, layer_cases, decoder_cases, token_cases):
        things = cases(device, dtype, plan.length)
        progress(things[0].what.split(",")[0])
        rows += measure(things, device, plan)
    waits = "none: until all kernels are in the queue" if device.type == "cuda" else "until the result: the total time"
    facts = {"length": plan.length, "heads": HEADS, "width": WIDTH, "dtype": str(dtype).removeprefix("torch.")}
    return {"environment": environment(device), "waits": waits, **facts, "rows": rows}


def measure(things: list[Measured], device: torch.device, plan: Plan) -> list[dict[str, Any]]:
    times: list[list[float]] = [[] for _ in things]
    for thing in things:
        for _ in range(plan.warm_up):
            thing.call()
    for _ in range(plan.rounds):
        for thing, found in zip(things, times, strict=True):
            wait_for(device)
            begun = time.perf_counter()
            for _ in range(plan.calls):
                thing.call()
            found.append(1e6 * (time.perf_counter() - begun) / plan.calls)
    wait_for(device)
    medians = [statistics.median(found) for found in times]
    base = {thing.what: median for thing, median in zip(things, medians, strict=True) if thing.contender != "tra"}
    return [
        {
            "what": thing.what,
            "contender": thing.contender,
            "us": round(median, 1),
            "fastest_us": round(min(found), 1),
            "slowest_us": round(max(found), 1),
            "ratio": round(median / base[thing.what], 3),
        }
        for thing, found, median in zip(things, times, medians, strict=True)
    ]


def both_ways(
    what: str, contender: str, call: Callable[[], Tensor], leaves: Sequence[Tensor], grad_out: Tensor
) -> list[Measured]:
    """Return the measurements of a call without gradients and with a backward pass."""

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    return [
        Measured(f"{what}, forward", contender, forward),
        Measured(f"{what}, forward and backward", contender, lambda: torch.autograd.grad(call(), leaves, grad_out)),
    ]


def operator_cases(device: torch.device, dtype: torch.dtype, length: int) -> list[Measured]:
    torch.manual_seed(0)
    size = (1, HEADS, length, WIDTH)
    query, key, value = (torch.randn(size, device=device).to(dtype).requires_grad_() for _ in range(3))
    log_forget = F.logsigmoid(torch.randn(size[:3], device=device)).requires_grad_()
    grad_out = torch.randn(size, device=device).to(dtype)
    bound = Case(WIDTH, length).bound

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def ours() -> Tensor:
        return tra.threshold_relative_attention(query, key, value, log_forget, score_bound=bound)

    return [
        *both_ways("operator", "SDPA", sdpa, (query, key, value), grad_out),
        *both_ways("operator", "tra", ours, (query, key, value, log_forget), grad_out),
    ]


def layer_cases(device: torch.device, dtype: torch.dtype, length: int) -> list[Measured]:
    things = []
    for name in ("rope", "tra"):
        torch.manual_seed(0)
        layer: nn.Module = MECHANISMS[name](HEADS * WIDTH, HEADS).to(device, dtype)
        x = torch.randn(1, length, HEADS * WIDTH, device=device).to(dtype).requires_grad_()
        leaves = [x, *layer.parameters()]
        things += both_ways("layer", name, lambda layer=layer, x=x: layer(x), leaves, torch.randn_like(x))  # type: ignore[misc]
    return things


def decoder_of(name: str, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return a decoder of one layer."""
    torch.manual_seed(0)
    config = DecoderConfig(VOCABULARY, HEADS * WIDTH, n_layers=1, n_heads=HEADS, mechanism=name)
    return Decoder(config).to(device, dtype)


def decoder_cases(device: torch.device, dtype: torch.dtype, length: int) -> list[Measured]:
    """Return steps without an optimizer, which drop their gradients."""
    things = []
    for name in ("rope", "tra"):
        model = decoder_of(name, device, dtype)
        tokens = torch.randint(VOCABULARY, (1, length), device=device)
        grad_out = torch.randn(1, length, VOCABULARY, device=device).to(dtype)
        leaves = list(model.parameters())
        things += both_ways("decoder of one layer", name, lambda m=model, t=tokens: m(t), leaves, grad_out)  # type: ignore[misc]
    return things


def token_cases(device: torch.device, dtype: torch.dtype, length: int) -> list[Measured]:
    """Return decoding steps without a CUDA graph, after a context of at least `length` tokens."""
    things = []
    for name, kind in (("rope", "growing"), ("tra", "growing"), ("tra", "static")):
        model = decoder_of(name, device, dtype).eval()
        what = "one token" if kind == "growing" else "one token, static cache"
        things.append(Measured(what, name, token_step(model, device, length, kind == "static")))
    # RoPE's layer takes no static cache, so both are compared with its growing cache
    things.append(things[0]._replace(what="one token, static cache", contender="rope, growing cache"))
    return things


def token_step(model: Decoder, device: torch.device, length: int, static: bool) -> Callable[[], object]:
    """Return a function that decodes the next token; after `length` more tokens it starts again from the context."""
    prompt = torch.randint(VOCABULARY, (1, length), device=device)
    cache: Any = None

    @torch.no_grad()
    def step() -> Tensor:
        nonlocal cache
        if cache is None or cache.length >= 2 * length:
            cache = model.new_cache(2 * length if static else None)
            model(prompt, cache=cache)
        out: Tensor = model(prompt[:, :1], cache=cache)
        return out

    return step
