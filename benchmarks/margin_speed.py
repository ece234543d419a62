"""Measure what a margin costs on a GPU: TRA's kernels and a training step at margins 0, 2 and ∞, and SDPA flash.

Kernels are measured as in `tra bench op` (CUDA graphs, 32,768 tokens, 8 heads, bfloat16, half of the keys above the
threshold), with full walks and with early stops. Steps are measured as in `tra bench step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tra
from benchmarks import command
from tra.bench.inputs import Case, make_inputs
from tra.bench.kernels import MODES, contenders
from tra.bench.step import MeasuringProcess, Shape
from tra.bench.timing import gpu_clocks, gpu_environment, measure_graph, row_or_error

MARGINS = (0.0, 2.0, math.inf)
CASES = (Case(64, 16_384), Case(128, 16_384), Case(64, 65_536))
STEPS = (Shape("medium", 64, 256), Shape("mini", 64, 512))


def attend(case: Case, margin: float, tolerance: float | None, *inputs: Tensor) -> Tensor:
    return tra.threshold_relative_attention(
        *inputs, impl="triton", score_bound=case.bound, margin=margin, tolerance=tolerance
    )


def measure_kernels(device: torch.device, cases: Sequence[Case] = CASES, rounds: int = 9) -> list[dict[str, Any]]:
    """Return a row for each case, margin, walk and mode. Margins take turns, so a warming GPU favours none."""
    rows = []
    for case in cases:
        inputs = make_inputs(case, device)
        grad_out = torch.randn_like(inputs.value)
        calls: dict[tuple[str, str], Callable[..., Tensor]] = {("SDPA flash", ""): contenders(case)["SDPA flash"]}
        for walk, tolerance in (("early stop", None), ("full walk", 0.0)):
            for margin in MARGINS:
                calls[f"margin {margin:g}", walk] = partial(attend, case, margin, tolerance)
        for mode in MODES:
            for (name, walk), call in calls.items():
                command.progress(f"{name}, {walk}, {mode}, {case}")
                facts = {"contender": name, "walk": walk, "mode": mode, "width": case.width, "length": case.length}
                wanted = inputs[:3] if name == "SDPA flash" else inputs

                def forward(call: Callable[..., Tensor] = call, inputs: tuple[Tensor, ...] = inputs) -> Tensor:
                    with torch.no_grad():
                        return call(*inputs)

                def both(
                    call: Callable[..., Tensor] = call,
                    inputs: tuple[Tensor, ...] = inputs,
                    wanted: tuple[Tensor, ...] = wanted,
                    grad_out: Tensor = grad_out,
                ) -> tuple[Tensor, ...]:
                    return torch.autograd.grad(call(*inputs), wanted, grad_out)

                timed = forward if mode == "forward" else both
                rows.append(row_or_error(facts, lambda timed=timed: measure_graph(timed, rounds)._asdict()))  # type: ignore[misc]
    for row in rows:
        same = {name: row[name] for name in ("mode", "width", "length")}
        flash = next(r for r in rows if r["contender"] == "SDPA flash" and same.items() <= r.items())
        usual = [
            r for r in rows if r["contender"] == "margin 0" and r["walk"] == row["walk"] and same.items() <= r.items()
        ]
        if "ms" in row and "ms" in flash:
            row["times_flash"] = round(flash["ms"] / row["ms"], 3)
        if usual and "ms" in row:
            row["over_margin_0"] = round(row["ms"] / usual[0]["ms"], 3)
    return rows


def measure_steps(device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each shape and margin. Each has a process; one is timed while the others wait."""
    rows = []
    processes = [
        MeasuringProcess("tra", shape._replace(margin=margin), str(device)) for shape in STEPS for margin in MARGINS
    ]
    try:
        ready = [process for process in processes if process.wait_until_ready()]
        for process in ready:
            process.measure()
    finally:
        for process in processes:
            process.stop()
    rows = [process.result for process in processes]
    for row in rows:
        usual = next(r for r in rows if r["margin"] == 0 and r["size"] == row["size"])
        if "step_ms" in row and "step_ms" in usual:
            row["over_margin_0"] = round(row["step_ms"] / usual["step_ms"], 3)
    for row in rows:
        row["margin"] = f"{row['margin']:g}"  # JSON has no infinity
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("margin_speed", __doc__)
    parser.add_argument("--parts", nargs="+", choices=("kernels", "steps"), default=["kernels", "steps"])
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each kernel")
    options = parser.parse_args(arguments)
    device = command.require_gpu(command.pick_device(options.device))
    clocks = [gpu_clocks()]
    rows = measure_kernels(device, rounds=options.rounds) if "kernels" in options.parts else []
    rows += measure_steps(device) if "steps" in options.parts else []
    clocks.append(gpu_clocks())
    command.show({"environment": gpu_environment(device) | {"clocks": clocks}, "rows": rows}, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
