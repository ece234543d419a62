"""The command: one verb a function. Nothing else parses arguments."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table


def bench(
    what: Annotated[Literal["op"], tyro.conf.Positional] = "op",
    /,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Measure speed and memory on this machine.

    Args:
        what: "op" compares the implementations of the operator.
        as_json: Print JSON for scripts instead of a table.
    """
    from tra.bench.op import bench_op

    console = Console(stderr=True)
    with console.status("measuring") as status:
        result = bench_op(progress=lambda text: status.update(f"measuring {text}"))
    if as_json:
        print(json.dumps(result, indent=2))
        return
    table = Table("implementation", "length", "forward", "backward", "peak memory")
    for row in result["rows"]:  # type: ignore[attr-defined]
        table.add_row(
            row["impl"],
            f"{row['length']:,}",
            f"{row['forward_ms']:.0f} ms",
            f"{row['backward_ms']:.0f} ms",
            f"{row['peak_mib']:.0f} MiB",
        )
    Console().print(table)
    print(f"at 4,096 tokens blockwise is {result['speedup']:.1f} times as fast as reference, forward and backward")
    print(f"at 16,384 tokens it takes {result['memory_ratio']:.2f} of the memory of a single head's T × T map")


def main() -> None:
    """Entry point of `tra` and of `python -m tra`."""
    verbs = {"bench": bench}
    try:
        tyro.extras.subcommand_cli_from_dict(verbs, prog="tra", description="Threshold Relative Attention.")
    except ValueError as error:
        print(f"tra: {error}", file=sys.stderr)
        raise SystemExit(2) from None
