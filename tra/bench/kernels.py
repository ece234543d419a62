"""The fused operator on a GPU, against the attention kernels that everybody has.

Nothing is timed before outputs and gradients have passed the rule of the tests in the same call. Times are those of a
CUDA graph's replay, so that no language's launch costs count, for contenders as for us; peak memory is above what the
inputs take. 32,768 tokens, in one sequence where it is longer; 8 heads; bfloat16.
"""

from __future__ import annotations

import math
import statistics
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tra
from tra.ops.inputs import compute_dtype
from tra.runs import RunFolder, environment
from tra.tasks import generator
from tra.tasks.flipflop import FlipFlop
from tra.text.task import Stream

HEADS, TOKENS = 8, 32_768
LENGTHS = (256, 1024, 4096, 16_384, 65_536, 131_072)
SHIPPED = "flipflop-tra"


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    log_forget: Tensor


class Case(NamedTuple):
    """What is attended to: shapes, gates (δ, or "init" for log σ(N(0, 1))), and which keys are kept."""

    width: int
    length: int
    gates: str = "init"
    content: str = "dense"

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.length)

    @property
    def bound(self) -> float:
        """The layer's promise."""
        return math.sqrt(self.width) * (1 + 2**-7)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Normalised random queries and keys: half of the keys kept, or one in a hundred, or none by one row in 64."""
    if case.content == "trained":
        drawn = FlipFlop(case.length + 2).sample("iid", 1, generator(0, "bench", device=device), device)
        return trained_inputs(RunFolder.open(SHIPPED), drawn.tokens[:, : case.length])
    draws = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(case.batch, HEADS, case.length, *shape, device=device, generator=draws)

    query, key = draw(case.width), draw(case.width)
    if case.content == "sparse":  # scores N(-m, 1), shifted along one direction, of which one in a hundred is positive
        quantile = 2.326
        share = quantile / (math.sqrt(case.width) + quantile)
        for x, sign in ((query, 1.0), (key, -1.0)):
            x[..., 1:] = F.rms_norm(x[..., 1:], (case.width - 1,)) * math.sqrt(1 - share)
            x[..., 0] = sign * math.sqrt(share * case.width)
    query, key = (F.rms_norm(x, (case.width,)) for x in (query, key))
    if case.content == "null rows":
        query[:, :, ::64] = 0.0
    gate = F.logsigmoid(draw()) if case.gates == "init" else torch.full_like(draw(), float(case.gates))
    return _leaves(query, key, draw(case.width), gate)


def trained_inputs(run: RunFolder, tokens: Tensor) -> Inputs:
    """Queries, keys, values and gates of a trained TRA run on one sequence `[1, T]`; layers as the batch."""
    model = run.load_model(tokens.device)
    if model.config.mechanism != "tra":
        raise ValueError(f"the kernels are TRA's, but {run.path} is of {model.config.mechanism}")
    found: list[tuple[Tensor, ...]] = []

    def look(layer: Any, given: tuple[Tensor, ...]) -> None:
        seen = layer.prepare_inputs(given[0])
        found.append((seen.query, seen.key, seen.value, layer.log_forget(given[0])))

    hooks = [block.get_submodule("self_attn").register_forward_pre_hook(look) for block in model.layers]
    with torch.no_grad():
        model.hidden(tokens)
    for hook in hooks:
        hook.remove()
    return _leaves(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _leaves(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Inputs:
    query, key, value = (x.detach().to(torch.bfloat16).requires_grad_() for x in (query, key, value))
    return Inputs(query, key, value, log_forget.detach().float().requires_grad_())


def plain(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
    """What one would write: the whole map, S and P in the dtype of the inputs, sums in float32."""
    wide = compute_dtype(query.dtype)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).to(wide)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    kept = seen & (scores > 0)
    distance = kept.flip(-1).cumsum(-1).flip(-1)
    logits = (scores + log_forget[..., None] * distance).masked_fill(~kept, -torch.inf)
    weights = torch.softmax(logits, -1).masked_fill(~kept.any(-1, keepdim=True), 0.0)
    return weights.to(value.dtype) @ value


def check(width: int, device: torch.device) -> dict[str, float]:
    """Errors of output and gradients, each over what the rule allows: twice plain PyTorch's, against float64.

    Queries and keys are multiples of 1/4, so that scores are exact and all keep the same keys.

    Raises:
        RuntimeError: If one is above 1.
    """
    draws = torch.Generator(device).manual_seed(width)

    def grid() -> Tensor:
        return torch.randint(-8, 9, (2, 4, 1000, width), device=device, generator=draws) / 4

    value = torch.randn(2, 4, 1000, width, device=device, generator=draws)
    gate = F.logsigmoid(torch.randn(2, 4, 1000, device=device, generator=draws))
    inputs = _leaves(grid(), grid(), value, gate)
    exact = Inputs(*(x.detach().double().requires_grad_() for x in inputs))
    grad_out = torch.randn(2, 4, 1000, width, device=device, generator=draws).to(torch.bfloat16)
    bound = float((exact.query @ exact.key.mT).detach().abs().max()) * width**-0.5

    def results(out: Tensor, leaves: Inputs) -> tuple[Tensor, ...]:
        return out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))

    ours = results(tra.threshold_relative_attention(*inputs, impl="triton", score_bound=bound), inputs)
    theirs = results(plain(*inputs), inputs)
    truth = results(tra.threshold_relative_attention(*exact, impl="reference"), exact)
    found = {}
    for name, got, usual, right in zip(("output", *Inputs._fields), ours, theirs, truth, strict=True):
        error, allowed = ((x.double() - right).square().mean().sqrt() for x in (got, usual))
        found[name] = round(float(error / (2 * allowed)), 3)
    if max(found.values()) > 1:
        raise RuntimeError(f"the kernels are wrong at width {width}, nothing is measured: {found}")
    return found


class Measured(NamedTuple):
    ms: float
    fastest_ms: float
    slowest_ms: float
    peak_mib: int


def measure(call: Callable[[], object], rounds: int = 7) -> Measured:
    """Of a CUDA graph of one call; peak memory of the call outside of a graph."""
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
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    median, fastest, slowest = (round(x, 4) for x in (statistics.median(times), min(times), max(times)))
    return Measured(median, fastest, slowest, round(peak / 2**20))


def contenders(case: Case) -> dict[str, Callable[..., Tensor]]:
    """By name: functions of query, key, value and gates."""

    def ours(tolerance: float | None) -> Callable[..., Tensor]:
        return lambda *inputs: tra.threshold_relative_attention(
            *inputs, impl="triton", score_bound=case.bound, tolerance=tolerance
        )

    def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
        def call(query: Tensor, key: Tensor, value: Tensor, _: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        return call

    chosen = {"tra": ours(None)}
    if case.gates == "init":
        chosen["tra, full walk"] = ours(0.0)
        chosen["SDPA flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
        if case.content == "dense":
            chosen["SDPA cuDNN"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    if case == Case(64, 4096):
        chosen["plain, compiled"] = torch.compile(plain, dynamic=False)
    if case in (Case(64, 4096), Case(64, 16_384)):
        chosen["FlexAttention, causal"] = _flex(case)
    return chosen


def _flex(case: Case) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.length, case.length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value, _: compiled(query, key, value, block_mask=mask)


def cases(lengths: Sequence[int] = LENGTHS) -> list[Case]:
    found = [Case(width, length) for width in (64, 128) for length in lengths]
    found += [Case(64, length, gates) for length in lengths if length >= 4096 for gates in ("-0.05", "-0.01")]
    found += [Case(64, 16_384, "init", content) for content in ("sparse", "null rows", "trained")]
    return [case for case in found if case.length in lengths]


def bench_kernels(
    device: torch.device, progress: Callable[[str], None] = lambda _: None, lengths: Sequence[int] = LENGTHS
) -> dict[str, Any]:
    """All cases, a row each; ratios to SDPA flash on the same shapes."""
    progress("correctness")
    checked = {str(width): check(width, device) for width in (64, 128)}
    rows: list[dict[str, Any]] = []
    clocks = [_clocks()]
    for case in cases(lengths):
        inputs = make_inputs(case, device)
        grad_out = torch.randn_like(inputs.value)
        for name, attend in contenders(case).items():
            for mode in ("forward", "forward and backward"):
                if name.startswith("plain") and mode == "forward":
                    continue
                progress(f"{name}, {mode}, {case}")
                rows.append(_row(case, inputs, name, mode, attend, grad_out))
        del inputs, grad_out
        torch.cuda.empty_cache()
    if max(lengths) >= 65_536:
        progress("a million tokens")
        rows.append(a_million_tokens(device))
    clocks.append(_clocks())
    for row in rows:
        _compare_with_flash(row, rows)
    return {
        "environment": environment(device) | {"triton": _triton_version(), "clocks": clocks},
        "check": checked,
        "rows": rows,
    }


def bench_trained(
    device: torch.device,
    run: RunFolder,
    stream: Stream,
    progress: Callable[[str], None] = lambda _: None,
    lengths: Sequence[int] = (4096, 16_384, 65_536),
) -> dict[str, Any]:
    """The queries, keys and gates of a language model reading a text, at lengths that the text has."""
    checked = {str(width): check(width, device) for width in (64, 128)}
    rows: list[dict[str, Any]] = []
    for length in (length for length in lengths if length <= len(stream.tokens)):
        ids = torch.from_numpy(np.asarray(stream.tokens[:length]).astype(np.int64)).to(device)
        inputs = trained_inputs(run, ids[None])
        case = Case(inputs.query.shape[-1], length, "init", "trained")
        grad_out = torch.randn_like(inputs.value)
        for name, attend in contenders(case).items():
            for mode in ("forward", "forward and backward"):
                progress(f"{name}, {mode}, {length:,} tokens")
                rows.append(_row(case, inputs, name, mode, attend, grad_out))
        del inputs, grad_out
        torch.cuda.empty_cache()
    for row in rows:
        _compare_with_flash(row, rows)
    facts = {"run": run.path.name, "text": stream.name, "config": run.config().to_dict()}
    return {"environment": environment(device) | {"triton": _triton_version()}, "check": checked, **facts, "rows": rows}


def _row(
    case: Case, inputs: Inputs, name: str, mode: str, attend: Callable[..., Tensor], grad_out: Tensor
) -> dict[str, Any]:
    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    wanted = inputs if name.startswith(("tra", "plain")) else inputs[:3]

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*inputs), wanted, grad_out)

    row: dict[str, Any] = {"contender": name, "mode": mode, **case._asdict(), "batch": inputs.query.shape[0]}
    row["heads"] = inputs.query.shape[1]
    try:
        row |= measure(forward if mode == "forward" else both)._asdict()
    except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
        row["error"] = str(error).splitlines()[0][:120]
        torch.cuda.synchronize()
    return row


def a_million_tokens(device: torch.device) -> dict[str, Any]:
    """One sequence of 2**20, forward and backward, once: no graph, as memory is what is asked for."""
    case = Case(64, 2**20)
    inputs = make_inputs(case, device)
    grad_out = torch.randn_like(inputs.value)
    attend = contenders(case)["tra"]
    times = []
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        grads = torch.autograd.grad(attend(*inputs), inputs, grad_out)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
        finite = all(bool(x.isfinite().all()) for x in grads)
        del grads
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "contender": "tra",
        "mode": "forward and backward",
        **case._asdict(),
        "batch": 1,
        "heads": HEADS,
        "ms": round(times[-1], 3),
        "peak_mib": round(peak / 2**20),
        "finite": finite,
    }


def _compare_with_flash(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    def same(other: dict[str, Any]) -> bool:
        names = ("mode", "width", "length", "batch", "heads")
        return other["contender"] == "SDPA flash" and all(other[name] == row[name] for name in names)

    flash = next((other for other in rows if same(other) and "ms" in other), None)
    if flash is not None and "ms" in row:
        row["times_flash"] = round(flash["ms"] / row["ms"], 3)


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _clocks() -> str | None:
    """SM and memory clock, power and driver, as the driver tells them."""
    query = "clocks.sm,clocks.mem,power.draw,driver_version"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
