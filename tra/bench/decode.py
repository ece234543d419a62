"""Decoding on a GPU: one token over a long context, against PyTorch's attention on the same shapes.

Nothing is timed before it has passed the rule of `judge.py` in the same call. Times are those of a CUDA graph of many
calls, divided by their number. Each call has the keys of another window of a longer cache, as many as the L2 cache
can't hold: in a model everything else passes through it between two tokens, so no keys wait there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tra
from tra.bench.judge import error_ratio, plain_attention, require
from tra.bench.timing import gpu_clocks, gpu_environment, measure_graph, row_or_error
from tra.ops.triton import decode_plan

CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144)
GATES = ("init", "-0.05", "-0.001")
LAYOUTS = ("tokens first", "heads first")
"""Layouts of a cache: all heads of a token side by side, as in our static cache, or all tokens of a head."""
MIN_CALLS = 20
"""Fewest calls in a CUDA graph."""
MAX_STEP = 16_384
"""Keys between the windows of two calls."""
SDPA = {"SDPA": None, "SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
Times = dict[str, float]
Timer = Callable[[Callable[[int], object], int], Times]


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    width: int

    @property
    def bound(self) -> float:
        """Return the layer's promise."""
        return math.sqrt(self.width) * (1 + 2**-7)

    def bytes_of(self, keys: int) -> int:
        """Return the bytes of keys and values in half precision."""
        return 2 * self.batch * self.kv_heads * self.width * keys * 2


SHAPES = (Shape(1, 8, 8, 64), Shape(32, 8, 8, 64), Shape(1, 32, 8, 128))


class DecodeInputs(NamedTuple):
    """One token's queries and gates, and a cache of several windows."""

    query: Tensor  # [B, H, 1, D]
    key: Tensor  # [B, Hkv, context + (windows - 1) step, D]
    value: Tensor
    log_forget: Tensor  # [B, H, 1]
    context: int
    step: int
    windows: int

    def window(self, call: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        start = call % self.windows * self.step
        key, value = (x[:, :, start : start + self.context] for x in (self.key, self.value))
        return self.query, key, value, self.log_forget


def windows_for(shape: Shape, context: int, device: torch.device) -> int:
    """Return enough windows to exceed the L2 cache four times, even by the keys that forgetful heads read."""
    if device.type != "cuda":
        return 2
    properties = torch.cuda.get_device_properties(device)
    heads, block = shape.batch * shape.kv_heads, 64
    first = decode_plan.phases(
        -(-context // block), heads, block, properties.multi_processor_count, True, decode_plan.PIECE_KEYS
    )[0]
    return -(-4 * properties.L2_cache_size // shape.bytes_of(min(context, first.blocks * block)))


def gates_of(name: str, shape: Shape, device: torch.device) -> Tensor:
    """Return δ: a number, or "init" for log σ(N(0, 1))."""
    size = (shape.batch, shape.heads, 1)
    if name != "init":
        return torch.full(size, float(name), device=device)
    return F.logsigmoid(torch.randn(size, device=device, generator=torch.Generator(device).manual_seed(1)))


def make_inputs(
    shape: Shape, context: int, device: torch.device, dtype: torch.dtype, layout: str = LAYOUTS[0]
) -> DecodeInputs:
    """Return normalised random queries and keys: half of the keys are kept.

    Drawn sequence by sequence: walks over more than 2^31 numbers, drawn and normalised at once, went on to the end.
    """
    windows, step = windows_for(shape, context, device), min(context, MAX_STEP)
    draws = torch.Generator(device).manual_seed(0)

    def draw(heads: int, length: int, norm: bool = False) -> Tensor:
        size = (*((heads, length) if layout == "heads first" else (length, heads)), shape.width)
        drawn = torch.empty(shape.batch, *size, device=device, dtype=dtype)
        for sequence in drawn:
            sequence.copy_(torch.randn(size, device=device, dtype=dtype, generator=draws))
            if norm:
                sequence.copy_(F.rms_norm(sequence, (shape.width,)))
        return drawn if layout == "heads first" else drawn.transpose(1, 2)

    length = context + (windows - 1) * step
    query, key, value = draw(shape.heads, 1, True), draw(shape.kv_heads, length, True), draw(shape.kv_heads, length)
    return DecodeInputs(query, key, value, gates_of("init", shape, device), context, step, windows)


@torch.no_grad()
def check(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16, context: int = 5000) -> Times:
    """Return the errors of the output, over what the rule of `judge.py` allows; see `require`."""
    draws = torch.Generator(device).manual_seed(shape.width)

    def grid(heads: int, length: int) -> Tensor:
        drawn = torch.randint(-8, 9, (shape.batch, heads, length, shape.width), device=device, generator=draws)
        return (drawn / 4).to(dtype)

    query, key = grid(shape.heads, 1), grid(shape.kv_heads, context)
    value = torch.randn(key.shape, device=device, generator=draws).to(dtype)
    group = shape.heads // shape.kv_heads
    scores = query.double() @ key.double().repeat_interleave(group, 1).mT
    bound = float(scores.abs().max()) * shape.width**-0.5
    ratios = {}
    for gates in GATES:
        inputs = (query, key, value, gates_of(gates, shape, device))
        exact = tra.threshold_relative_attention(*(x.double() for x in inputs), impl="reference")
        plain = plain_attention(*inputs)
        for name, tolerance in (("", None), (", full walk", 0.0)):
            got = tra.threshold_relative_attention(*inputs, impl="triton", score_bound=bound, tolerance=tolerance)
            ratios[gates + name] = error_ratio(got, plain, exact)
    return require(ratios, f"decoding is wrong at {shape}")


def time_calls(call: Callable[[int], object], number: int) -> Times:
    """Return the milliseconds of a call, from a CUDA graph of `number` of them."""

    def calls() -> None:
        for i in range(number):
            call(i)

    found = measure_graph(calls)._asdict()
    return {name: round(found[name] / number, 5) for name in ("ms", "fastest_ms", "slowest_ms")}


def tra_calls(inputs: DecodeInputs, bound: float, tolerance: float | None) -> Callable[[int], Tensor]:
    return lambda i: tra.threshold_relative_attention(
        *inputs.window(i), impl="triton", score_bound=bound, tolerance=tolerance
    )


def sdpa_calls(inputs: DecodeInputs) -> dict[str, Callable[[int], Tensor]]:
    """Return calls of PyTorch's attention, by contender."""
    grouped = inputs.query.shape[1] != inputs.key.shape[1]

    def call(backend: SDPBackend | None, i: int) -> Tensor:
        query, key, value, _ = inputs.window(i)
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)

    return {name: partial(call, backend) for name, backend in SDPA.items()}


def measure_row(facts: dict[str, Any], call: Callable[[int], object], windows: int, timer: Timer) -> dict[str, Any]:
    with torch.no_grad():
        return row_or_error(facts, lambda: timer(call, max(MIN_CALLS, windows)))


def bench_decode(
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
    shapes: Sequence[Shape] = SHAPES,
    contexts: Sequence[int] = CONTEXTS,
    dtype: torch.dtype = torch.bfloat16,
    timer: Timer = time_calls,
) -> dict[str, Any]:
    """Return a row per shape, context and contender, with ratios to the fastest of PyTorch's."""
    progress("correctness")
    checked = {str(tuple(shape)): check(shape._replace(batch=min(shape.batch, 4)), device, dtype) for shape in shapes}
    rows: list[dict[str, Any]] = []
    clocks = [gpu_clocks()]
    for shape, context, layout in itertools.product(shapes, contexts, LAYOUTS):
        windows = windows_for(shape, context, device)
        facts = shape._asdict() | {"context": context, "layout": layout, "windows": windows, "content": "random"}
        refused = _too_large(shape, context, windows, device)
        if refused is not None:
            rows.append({"contender": "all", **facts, "error": refused})
            continue
        inputs = make_inputs(shape, context, device, dtype, layout)
        for gates in GATES if layout == LAYOUTS[0] else GATES[:1]:
            progress(f"tra, gates {gates}, {shape}, {context:,} keys")
            at = inputs._replace(log_forget=gates_of(gates, shape, device))
            named = {"contender": "tra", "gates": gates, **facts}
            rows.append(measure_row(named, tra_calls(at, shape.bound, None), windows, timer))
        progress(f"the others, {shape}, {context:,} keys, {layout}")
        others = {"tra, full walk": tra_calls(inputs, shape.bound, 0.0), **sdpa_calls(inputs)}
        rows += [measure_row({"contender": name, **facts}, call, windows, timer) for name, call in others.items()]
        del inputs, at
        if device.type == "cuda":
            torch.cuda.empty_cache()
    clocks.append(gpu_clocks())
    compare_with_sdpa(rows)
    return {"environment": gpu_environment(device) | {"clocks": clocks}, "check": checked, "rows": rows}


def _too_large(shape: Shape, context: int, windows: int, device: torch.device) -> str | None:
    """Return why keys and values, and the copy that normalising takes, don't fit; None if they do."""
    needed = 2 * shape.bytes_of(context + (windows - 1) * min(context, MAX_STEP))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else needed
    return f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free" if needed > free else None


def compare_with_sdpa(rows: Sequence[dict[str, Any]]) -> None:
    """Add `times_sdpa`: how many times as fast as the fastest of PyTorch's on the same shapes."""
    names = (*Shape._fields, "context", "content")
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["contender"] in SDPA and "ms" in row:
            same = tuple(row[name] for name in names)
            best[same] = min(row["ms"], best.get(same, math.inf))
    for row in rows:
        same = tuple(row[name] for name in names)
        if "ms" in row and same in best:
            row["times_sdpa"] = round(best[same] / row["ms"], 3)
