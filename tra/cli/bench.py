"""`tra bench`: measure speed and memory on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tra.cli.options import add_device, add_json, add_list

if TYPE_CHECKING:
    import torch

DESCRIPTION = """Measure speed and memory on this machine.

  op        the attention operator: on a GPU its kernels and other attention,
            on a CPU the implementations
  step      a whole training step of every mechanism, relative to RoPE's
  decode    one token after a long context; needs a GPU
  generate  generation from prompt to end, with a CUDA graph and without
  host      what a call costs the host: on a GPU the time until its kernels
            are in the queue, on a CPU the total time
  cost      a training step in the shapes of the paper's cost table"""

MEASUREMENTS = ("op", "step", "decode", "generate", "host", "cost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", default="op", choices=MEASUREMENTS, metavar="WHAT", help="see above (default: op)"
    )
    add_list(
        parser,
        "--only",
        "MECHANISM",
        "mechanisms that step, generate and cost measure, also FILE.py:NAME of your own (default: of step all, of the "
        "others tra and rope)",
    )
    add_device(parser)
    add_json(parser, "print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tra.runs import import_named, register
    from tra.training import pick_device

    options.only = [import_named(mechanism) for mechanism in options.only]
    for mechanism in options.only:
        register("mechanism", mechanism)
    device = pick_device(options.device)
    with Console(stderr=True).status("measuring") as status:
        result = _measure(options.what, device, options.only, lambda text: status.update(f"measuring {text}"))
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    _show(result["rows"])
    if options.what == "host":
        print(f"microseconds a call; waiting: {result['waits']}")
    if options.what == "op" and device.type == "cpu":
        _, short, long = (row["length"] for row in result["rows"][:3])
        print(f"at {short:,} tokens blockwise is {result['speedup']:.1f} times as fast as reference, both ways")
        print(f"at {long:,} tokens it takes {result['memory_ratio']:.2f} of the memory of one head's T × T map")
    return 0


def _measure(what: str, device: torch.device, only: list[str], progress: Callable[[str], None]) -> dict[str, Any]:
    from tra.attention import MECHANISMS
    from tra.bench.decode import bench_decode
    from tra.bench.generate import bench_generate
    from tra.bench.host import bench_host
    from tra.bench.kernels import bench_kernels
    from tra.bench.op import bench_op
    from tra.bench.step import COST_SHAPES, bench_step

    if what == "op":
        return bench_kernels(device, progress) if device.type == "cuda" else bench_op(progress)
    if what == "decode":
        if device.type != "cuda":
            raise ValueError("bench decode measures the kernels, which need a GPU")
        return bench_decode(device, progress)
    if what == "generate":
        return bench_generate(device, only or ("tra", "rope"), progress=progress)
    if what == "host":
        return bench_host(device, progress)
    if what == "cost":
        return bench_step(str(device), only or ("tra", "rope"), COST_SHAPES, progress)
    return bench_step(str(device), only or tuple(MECHANISMS), progress=progress)


def _show(rows: list[dict[str, Any]]) -> None:
    """Print a table with a column for every name that a row has."""
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(name.replace("_", " ") for name in names))
    for row in rows:
        values = [row.get(name, "") for name in names]
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in values))
    Console().print(table)
