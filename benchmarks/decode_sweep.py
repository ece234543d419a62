"""Decoding over block shapes, on a GPU. What is shipped in `tra/ops/triton/decode_plan.py` was chosen from this."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import command
from benchmarks.decode_mismatches import mismatches
from tra.bench import decode as bench
from tra.bench.decode import SHAPES, DecodeInputs, Shape, Timer, time_calls
from tra.ops.options import AttentionOptions
from tra.ops.triton import decode, decode_plan
from tra.ops.triton.block_shapes import ForwardTile


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
    """Measure all combinations of block shapes on some cases: shape, context, and gates or "full" walk.

    With it comes how many keys, in a million whose scores cancel, are kept otherwise than by the forward kernel.
    """
    found: list[dict[str, Any]] = []
    otherwise: dict[tuple[int, ...], int] = {}
    for shape, context, gates in cases:
        inputs = bench.make_inputs(shape, context, device, dtype)
        if gates != "full":
            inputs = inputs._replace(log_forget=bench.gates_of(gates, shape, device))
        options = AttentionOptions(
            shape.width**-0.5, score_bound=shape.bound, tolerance=0.0 if gates == "full" else 2.0**-24
        )
        (usual, *_) = decode_plan.decode_tiles(
            shape.width, shape.width, inputs.query.element_size(), inputs.query.device
        )
        for n_rows, piece, n_warps, n_stages in itertools.product(rows, pieces, warps, stages):
            tile = usual._replace(rows=n_rows, warps=n_warps, stages=n_stages)
            call = partial(_call_with, inputs, options, tile, piece)
            facts = {"rows": n_rows, "piece": piece, "warps": n_warps, "stages": n_stages}
            row = bench.measure_row(
                shape._asdict() | {"context": context, "gates": gates} | facts, call, inputs.windows, timer
            )
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


def _call_with(inputs: DecodeInputs, options: AttentionOptions, tile: ForwardTile, piece: int, call: int) -> Tensor:
    return decode.decode_attention(*inputs.window(call), None, None, None, options, tile, piece)


def main(arguments: Sequence[str] | None = None) -> int:
    options = command.parser("decode_sweep", __doc__).parse_args(arguments)
    device = command.require_gpu(command.pick_device(options.device))
    rows = sweep(device, show=command.progress if options.json else print)
    if options.json:
        command.show({"rows": rows}, True)
    return 0


if __name__ == "__main__":
    command.run(main)
