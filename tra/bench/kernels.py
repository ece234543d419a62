"""The fused operator on a GPU, against the attention kernels in common use.

Nothing is timed before outputs and gradients have passed the rule of `judge.py`. `ms` is the time of a CUDA graph's
replay, which has no launch costs; `eager_ms` is the time of a call without a graph, one among several. Peak memory
doesn't include the inputs. Inputs have 32,768 tokens, or one sequence if that is longer; 8 heads; bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tra
from tra.bench.inputs import HEADS, Case, Inputs, leaves, make_inputs
from tra.bench.judge import error_ratio, plain_attention, require
from tra.bench.timing import gpu_clocks, gpu_environment, measure_eager, measure_graph, milliseconds, row_or_error

LENGTHS = (256, 1024, 4096, 16_384, 65_536, 131_072)
MODES = ("forward", "forward and backward")


def check(width: int, device: torch.device) -> dict[str, float]:
    """Return the errors of output and gradients, over what the rule of `judge.py` allows; see `require`."""
    draws = torch.Generator(device).manual_seed(width)

    def grid() -> Tensor:
        return torch.randint(-8, 9, (2, 4, 1000, width), device=device, generator=draws) / 4

    value = torch.randn(2, 4, 1000, width, device=device, generator=draws)
    gate = F.logsigmoid(torch.randn(2, 4, 1000, device=device, generator=draws))
    inputs = leaves(grid(), grid(), value, gate)
    exact = Inputs(*(x.detach().double().requires_grad_() for x in inputs))
    grad_out = torch.randn(2, 4, 1000, width, device=device, generator=draws).to(torch.bfloat16)
    bound = float((exact.query @ exact.key.mT).detach().abs().max()) * width**-0.5

    def results(out: Tensor, wanted: Inputs) -> tuple[Tensor, ...]:
        return out.detach(), *torch.autograd.grad(out, wanted, grad_out.to(out.dtype))

    ours = results(tra.threshold_relative_attention(*inputs, impl="triton", score_bound=bound), inputs)
    theirs = results(plain_attention(*inputs), inputs)
    truth = results(tra.threshold_relative_attention(*exact, impl="reference"), exact)
    names = ("output", *Inputs._fields)
    ratios = {name: error_ratio(*found) for name, *found in zip(names, ours, theirs, truth, strict=True)}
    return require(ratios, f"the kernels are wrong at width {width}")


def contenders(case: Case) -> dict[str, Callable[..., Tensor]]:
    """Return functions of query, key, value and gates, by name."""

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
        chosen["plain, compiled"] = torch.compile(partial(plain_attention, wide_products=False), dynamic=False)
    if case in (Case(64, 4096), Case(64, 16_384)):
        chosen["FlexAttention, causal"] = _flex(case)
    return chosen


def _flex(case: Case) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.length, case.length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value, _: compiled(query, key, value, block_mask=mask)


def cases() -> list[Case]:
    found = [Case(width, length) for width in (64, 128) for length in LENGTHS]
    found += [Case(64, length, gates) for length in LENGTHS if length >= 4096 for gates in ("-0.05", "-0.01")]
    return found + [Case(64, 16_384, "init", content) for content in ("sparse", "null rows", "trained")]


def bench_kernels(device: torch.device, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Return a row per case and contender, with ratios to SDPA flash on the same shapes."""
    progress("correctness")
    checked = {str(width): check(width, device) for width in (64, 128)}
    rows: list[dict[str, Any]] = []
    clocks = [gpu_clocks()]
    for case in cases():
        rows += measure_case(case, make_inputs(case, device), progress)
    progress("a million tokens")
    rows.append(a_million_tokens(device))
    clocks.append(gpu_clocks())
    compare_with_flash(rows)
    return {"environment": gpu_environment(device) | {"clocks": clocks}, "check": checked, "rows": rows}


def measure_case(case: Case, inputs: Inputs, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a row per contender and mode."""
    grad_out = torch.randn_like(inputs.value)
    rows = []
    for name, attend in contenders(case).items():
        for mode in MODES:
            if not (name.startswith("plain") and mode == "forward"):
                progress(f"{name}, {mode}, {case}")
                rows.append(_row(case, inputs, name, mode, attend, grad_out))
    torch.cuda.empty_cache()
    return rows


def _row(
    case: Case, inputs: Inputs, name: str, mode: str, attend: Callable[..., Tensor], grad_out: Tensor
) -> dict[str, Any]:
    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    wanted = inputs if name.startswith(("tra", "plain")) else inputs[:3]

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*inputs), wanted, grad_out)

    batch, heads = inputs.query.shape[:2]
    facts = {"contender": name, "mode": mode, **case._asdict(), "batch": batch, "heads": heads}
    call = forward if mode == "forward" else both
    return row_or_error(facts, lambda: measure_graph(call)._asdict() | {"eager_ms": measure_eager(call)})


def a_million_tokens(device: torch.device) -> dict[str, Any]:
    """Measure one sequence of 2**20 tokens, forward and backward: without a graph, as its memory matters."""
    case = Case(64, 2**20)
    inputs = make_inputs(case, device)
    grad_out = torch.randn_like(inputs.value)
    attend = contenders(case)["tra"]
    grads: list[Tensor] = []
    before = torch.cuda.memory_allocated()
    for _ in range(2):  # the first warms up
        grads.clear()
        torch.cuda.reset_peak_memory_stats()
        elapsed = milliseconds(lambda: grads.extend(torch.autograd.grad(attend(*inputs), inputs, grad_out)))
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "contender": "tra",
        "mode": "forward and backward",
        **case._asdict(),
        "batch": 1,
        "heads": HEADS,
        "ms": round(elapsed, 3),
        "peak_mib": round(peak / 2**20),
        "finite": all(bool(x.isfinite().all()) for x in grads),
    }


def compare_with_flash(rows: Sequence[dict[str, Any]]) -> None:
    """Add `times_flash`: how many times as fast as SDPA flash on the same shapes."""

    def shape(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("mode", "width", "length", "batch", "heads"))

    measured = [row for row in rows if "ms" in row]
    flash = {shape(row): row["ms"] for row in reversed(measured) if row["contender"] == "SDPA flash"}
    for row in measured:
        if shape(row) in flash:
            row["times_flash"] = round(flash[shape(row)] / row["ms"], 3)
