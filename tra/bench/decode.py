"""Decoding on a GPU: one token over a long context, against PyTorch's attention on the same shapes.

Nothing is timed before it has passed the rule of the tests in the same call. Times are those of a CUDA graph of many
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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tra
from tra.bench.kernels import _clocks, _triton_version, measure, trained_inputs
from tra.ops.inputs import compute_dtype
from tra.ops.triton import decode
from tra.runs import RunFolder, environment
from tra.text.task import Stream

CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144)
GATES = ("init", "-0.05", "-0.001")
LAYOUTS = ("tokens first", "heads first")
"""Of a cache in memory: all heads of a token side by side, as our static cache has it, or a head's tokens."""
CALLS = 20
"""Of a graph, at least."""
STEP = 16_384
"""Keys between the windows of two calls, at most."""
SDPA = {
    "SDPA": None,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
}
Times = dict[str, float]
Timer = Callable[[Callable[[int], object], int], Times]


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    width: int

    @property
    def bound(self) -> float:
        """The layer's promise."""
        return math.sqrt(self.width) * (1 + 2**-7)

    def bytes_of(self, keys: int, itemsize: int = 2) -> int:
        """Keys and values."""
        return 2 * self.batch * self.kv_heads * self.width * keys * itemsize


SHAPES = (Shape(1, 8, 8, 64), Shape(32, 8, 8, 64), Shape(1, 32, 8, 128))


class Given(NamedTuple):
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
    """As many as the L2 cache can't hold by far, even of the newest keys, which are all that a forgetful head reads."""
    if device.type != "cuda":
        return 2
    properties = torch.cuda.get_device_properties(device)
    heads, block = shape.batch * shape.kv_heads, 64
    first = decode.phases(-(-context // block), heads, block, properties.multi_processor_count, True, decode.PIECE)[0]
    return -(-4 * properties.L2_cache_size // shape.bytes_of(min(context, first.span * block)))


def gates_of(name: str, shape: Shape, device: torch.device) -> Tensor:
    """δ: a number, or "init" for log σ(N(0, 1))."""
    size = (shape.batch, shape.heads, 1)
    if name != "init":
        return torch.full(size, float(name), device=device)
    return F.logsigmoid(torch.randn(size, device=device, generator=torch.Generator(device).manual_seed(1)))


def make_given(shape: Shape, context: int, device: torch.device, dtype: torch.dtype, layout: str = LAYOUTS[0]) -> Given:
    """Normalised random queries and keys: half of the keys are kept.

    Drawn sequence by sequence: walks over more than 2^31 numbers, drawn and normalised at once, went on to the end.
    """
    windows, step = windows_for(shape, context, device), min(context, STEP)
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
    return Given(query, key, value, gates_of("init", shape, device), context, step, windows)


def plain(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
    """What one would write for one query: S and P in the dtype of the inputs, sums in float32."""
    wide, group = compute_dtype(query.dtype), query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = (query @ key.mT * query.shape[-1] ** -0.5).to(wide)
    kept = scores > 0
    logits = (scores + log_forget[..., None] * kept.flip(-1).cumsum(-1).flip(-1)).masked_fill(~kept, -torch.inf)
    weights = torch.softmax(logits, -1).masked_fill(~kept.any(-1, keepdim=True), 0.0)
    return weights.to(value.dtype) @ value


@torch.no_grad()
def check(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16, context: int = 5000) -> Times:
    """Errors of the output over what the rule allows: twice plain PyTorch's, against float64.

    Queries and keys are multiples of 1/4, so that scores are exact and all keep the same keys.

    Raises:
        RuntimeError: If one is above 1.
    """
    draws = torch.Generator(device).manual_seed(shape.width)

    def grid(heads: int, length: int) -> Tensor:
        drawn = torch.randint(-8, 9, (shape.batch, heads, length, shape.width), device=device, generator=draws)
        return (drawn / 4).to(dtype)

    query, key = grid(shape.heads, 1), grid(shape.kv_heads, context)
    value = torch.randn(key.shape, device=device, generator=draws).to(dtype)
    group = shape.heads // shape.kv_heads
    scores = query.double() @ key.double().repeat_interleave(group, 1).mT
    bound = float(scores.abs().max()) * shape.width**-0.5
    found = {}
    for gates in GATES:
        inputs = (query, key, value, gates_of(gates, shape, device))
        right = tra.threshold_relative_attention(*(x.double() for x in inputs), impl="reference")
        allowed = 2 * (plain(*inputs).double() - right).square().mean().sqrt()
        for name, tolerance in (("", None), (", full walk", 0.0)):
            got = tra.threshold_relative_attention(*inputs, impl="triton", score_bound=bound, tolerance=tolerance)
            found[gates + name] = round(float((got.double() - right).square().mean().sqrt() / allowed), 3)
    if not max(found.values()) <= 1:
        raise RuntimeError(f"decoding is wrong at {shape}, nothing is measured: {found}")
    return found


@torch.no_grad()
def mismatches(
    rows: int,
    *,
    warps: int | None = None,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    draws: int = 20,
    content: str = "random",
    heads: int = 8,
    length: int = 128,
    device: str = "cuda",
) -> int:
    """How many of `draws · heads · length²` keys decoding keeps and the forward kernel drops, or the reverse.

    Values are unit vectors, so an output is a row of weights, and 0 where a key is dropped. A query decodes alone, in
    blocks of `rows` rows.

    Args:
        content: Of queries and keys: "random"; "cancelling", whose products are 0 but for the order in which they are
            rounded; "exact", multiples of 1/4, on which nobody can differ.
    """
    generator = torch.Generator(device).manual_seed(rows)
    value = torch.eye(length, device=device, dtype=dtype).expand(1, heads, -1, -1)
    gates = torch.zeros(1, heads, length, device=device)
    first = torch.zeros(1, length, device=device, dtype=torch.int32)
    found = 0
    for _ in range(draws):
        query, key = (torch.randn(1, heads, length, width, device=device, generator=generator) for _ in range(2))
        if content == "exact":
            query, key = ((x * 4).round() / 4 for x in (query, key))
        if content == "cancelling":
            half, order = width // 2, torch.randperm(width, device=device, generator=generator)
            query[..., half:], key[..., half:] = -query[..., :half], key[..., :half]
            query, key = query[..., order], key[..., order]
        query, key = query.to(dtype), key.to(dtype)
        together = torch.ops.tra.fused_forward(
            query, key, value, gates, first, first + length - 1, None, 1e-3, 0.0, None, 0.0, 0.0, False
        )[0]
        (tile, *_) = decode._candidates(width, length, query)
        alone = decode.attend(
            query[0].transpose(0, 1)[:, :, None], key.expand(length, -1, -1, -1), value.expand(length, -1, -1, -1),
            gates[0].T[..., None], None, None, None, scale=1e-3, threshold=0.0, score_bound=None, tolerance=0.0,
            tile=tile._replace(rows=rows, warps=warps or tile.warps),
        )  # fmt: skip
        found += int(((alone[:, :, 0].transpose(0, 1) > 0) != (together[0] > 0)).sum())
    return found


def time_calls(call: Callable[[int], object], number: int) -> Times:
    """Milliseconds of a call, of a CUDA graph of `number` of them."""

    def calls() -> None:
        for i in range(number):
            call(i)

    found = measure(calls)._asdict()
    return {name: round(found[name] / number, 5) for name in ("ms", "fastest_ms", "slowest_ms")}


def ours(given: Given, bound: float, tolerance: float | None) -> Callable[[int], Tensor]:
    return lambda i: tra.threshold_relative_attention(
        *given.window(i), impl="triton", score_bound=bound, tolerance=tolerance
    )


def theirs(given: Given, backend: SDPBackend | None) -> Callable[[int], Tensor]:
    grouped = given.query.shape[1] != given.key.shape[1]

    def call(i: int) -> Tensor:
        query, key, value, _ = given.window(i)
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)

    return call


def _row(facts: dict[str, Any], call: Callable[[int], object], windows: int, timer: Timer) -> dict[str, Any]:
    try:
        with torch.no_grad():
            return facts | timer(call, max(CALLS, windows))
    except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return facts | {"error": str(error).splitlines()[0][:120]}


def bench_decode(
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
    shapes: Sequence[Shape] = SHAPES,
    contexts: Sequence[int] = CONTEXTS,
    dtype: torch.dtype = torch.bfloat16,
    timer: Timer = time_calls,
) -> dict[str, Any]:
    """A row per shape, context and contender; ratios to the fastest of PyTorch's."""
    progress("correctness")
    checked = {str(tuple(shape)): check(shape._replace(batch=min(shape.batch, 4)), device, dtype) for shape in shapes}
    kept = {str(shape.width): mismatches(16, width=shape.width, dtype=dtype, device=device.type) for shape in shapes}
    rows: list[dict[str, Any]] = []
    clocks = [_clocks()]
    for shape, context, layout in itertools.product(shapes, contexts, LAYOUTS):
        windows = windows_for(shape, context, device)
        facts = shape._asdict() | {"context": context, "layout": layout, "windows": windows, "content": "random"}
        refused = _too_large(shape, context, windows, device)
        if refused is not None:
            rows.append({"contender": "all", **facts, "error": refused})
            continue
        given = make_given(shape, context, device, dtype, layout)
        for gates in GATES if layout == LAYOUTS[0] else GATES[:1]:
            progress(f"tra, gates {gates}, {shape}, {context:,} keys")
            at = given._replace(log_forget=gates_of(gates, shape, device))
            named = {"contender": "tra", "gates": gates, **facts}
            rows.append(_row(named, ours(at, shape.bound, None), windows, timer))
        progress(f"the others, {shape}, {context:,} keys, {layout}")
        rows.append(_row({"contender": "tra, full walk", **facts}, ours(given, shape.bound, 0.0), windows, timer))
        rows += [_row({"contender": name, **facts}, theirs(given, SDPA[name]), windows, timer) for name in SDPA]
        del given, at
        if device.type == "cuda":
            torch.cuda.empty_cache()
    clocks.append(_clocks())
    compare_with_sdpa(rows)
    return {
        "environment": environment(device) | {"triton": _triton_version(), "clocks": clocks},
        "check": checked,
        "keys_kept_otherwise": kept,
        "rows": rows,
    }


def _too_large(shape: Shape, context: int, windows: int, device: torch.device) -> str | None:
    """Keys, values, and what normalising keys takes beside them."""
    needed = 2 * shape.bytes_of(context + (windows - 1) * min(context, STEP))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else needed
    return f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free" if needed > free else None


def bench_decode_trained(
    device: torch.device,
    run: RunFolder,
    stream: Stream,
    progress: Callable[[str], None] = lambda _: None,
    contexts: Sequence[int] = (4096, 16_384, 65_536),
    dtype: torch.dtype = torch.bfloat16,
    timer: Timer = time_calls,
) -> dict[str, Any]:
    """The last token of a text as each layer of a trained model reads it, at contexts that the text has."""
    rows: list[dict[str, Any]] = []
    checked: dict[str, Times] = {}
    for context in (context for context in contexts if context <= len(stream.tokens)):
        ids = torch.from_numpy(np.asarray(stream.tokens[:context]).astype(np.int64)).to(device)
        inputs = [x.detach() for x in trained_inputs(run, ids[None])]
        for layer in range(len(inputs[0])):
            query, key, value, log_forget = (x[layer : layer + 1] for x in inputs)
            shape = Shape(1, query.shape[1], key.shape[1], query.shape[3])
            if not checked:
                progress("correctness")
                checked[str(tuple(shape))] = check(shape, device, dtype)
            windows = windows_for(shape, context, device)
            key, value = (x.to(dtype).repeat(1, 1, windows, 1) for x in (key, value))
            given = Given(query[:, :, -1:].to(dtype), key, value, log_forget[:, :, -1:], context, context, windows)
            facts = shape._asdict() | {"context": context, "windows": windows, "content": "trained"}
            progress(f"layer {layer}, {context:,} keys")
            for name, tolerance in (("tra", None), ("tra, full walk", 0.0)):
                named = {"contender": name, "layer": layer, **facts}
                rows.append(_row(named, ours(given, shape.bound, tolerance), windows, timer))
            if layer == 0:  # the others don't look at what is there
                rows += [_row({"contender": name, **facts}, theirs(given, SDPA[name]), windows, timer) for name in SDPA]
    compare_with_sdpa(rows)
    facts = {"run": run.path.name, "text": stream.name, "config": run.config().to_dict()}
    return {"environment": environment(device) | {"triton": _triton_version()}, "check": checked, **facts, "rows": rows}


def compare_with_sdpa(rows: Sequence[dict[str, Any]]) -> None:
    """`times_sdpa`: how many times as fast as the fastest of PyTorch's on the same shapes."""
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


def sweep(
    device: torch.device,
    rows: Sequence[int] = (16, 32, 64),
    pieces: Sequence[int] = (128, 256, 512),
    warps: Sequence[int] = (1, 2, 4, 8),
    stages: Sequence[int] = (3,),
    cases: Sequence[tuple[Shape, int, str]] = tuple(itertools.product(SHAPES, (4096, 65_536), ("init", "full"))),
    dtype: torch.dtype = torch.bfloat16,
    timer: Timer = time_calls,
    show: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Every combination of block shapes on some cases, a line each: shape, context, and gates or "full" walk.

    With it comes how many keys, in a million whose scores cancel, are kept otherwise than by the forward kernel.
    """
    found: list[dict[str, Any]] = []
    otherwise: dict[tuple[int, ...], int] = {}
    for shape, context, gates in cases:
        given = make_given(shape, context, device, dtype)
        if gates != "full":
            given = given._replace(log_forget=gates_of(gates, shape, device))
        options: dict[str, Any] = {"scale": shape.width**-0.5, "threshold": 0.0, "score_bound": shape.bound}
        options["tolerance"] = 0.0 if gates == "full" else 2.0**-24
        (usual, *_) = decode._candidates(shape.width, shape.width, given.query)
        for n_rows, piece, n_warps, n_stages in itertools.product(rows, pieces, warps, stages):
            tile = usual._replace(rows=n_rows, warps=n_warps, stages=n_stages)
            call = partial(_call_with, given, options | {"tile": tile, "piece": piece})
            facts = {"rows": n_rows, "piece": piece, "warps": n_warps, "stages": n_stages}
            row = _row(shape._asdict() | {"context": context, "gates": gates} | facts, call, given.windows, timer)
            if "ms" in row:
                which = (n_rows, n_warps, shape.width)
                if which not in otherwise:
                    otherwise[which] = mismatches(
                        n_rows, warps=n_warps, width=shape.width, dtype=dtype, draws=8, content="cancelling",
                        device=device.type,
                    )  # fmt: skip
                row["keys_kept_otherwise"] = otherwise[which]
            found.append(row)
            show(", ".join(f"{name} {value}" for name, value in row.items()))
    return found


def _call_with(given: Given, options: dict[str, Any], i: int) -> Tensor:
    query, key, value, log_forget = given.window(i)
    return decode.attend(query, key, value, log_forget, None, None, None, **options)
