"""The kernels over block shapes, on a GPU: `python -m benchmarks.sweep forward|backward`.

Per shape the median microseconds of each kernel, with every key read and with walks that stop. Shapes are compiled
first, by a process each, as that takes most of the time. `results/bench/tiles.txt` is the log that the shipped shapes
come from.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

import tra
from benchmarks.step_kernels import kernel_times
from tra.bench import inputs as bench_inputs
from tra.ops.triton import block_shapes, eager
from tra.ops.triton.block_shapes import BackwardTile, ForwardTile

Shapes = dict[int, Sequence[ForwardTile | BackwardTile]]
FORWARD: Shapes = {
    64: [
        ForwardTile(64, keys, 4, stages, registers)
        for keys, registers in ((64, 0), (64, 168), (32, 0), (32, 168), (32, 128), (16, 128))
        for stages in (2, 3, 4)
    ],
    128: [
        ForwardTile(128, 64, 8, 3),
        ForwardTile(64, 64, 4, 2),
        ForwardTile(64, 32, 4, 3),
        ForwardTile(64, 32, 4, 3, 168),
    ],
}
BACKWARD: Shapes = {
    64: [
        BackwardTile(64, 64, keys, 4, 3, rows, 4, 3, limit) for keys, limit in ((64, 0), (32, 168)) for rows in (64, 32)
    ],
    128: [BackwardTile(64, 64, 64, 4, 2, 32, 4, 3), BackwardTile(64, 64, 32, 4, 3, 32, 4, 3)],
}
CASES = ((256, None), (1024, None), (16_384, 0.0), (16_384, None), (65_536, None))
KERNELS = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel")


def prepared(width: int, length: int, backward: bool) -> tuple[list[Tensor], float]:
    case = bench_inputs.Case(width, length)
    inputs = bench_inputs.make_inputs(case, torch.device("cuda"))
    return [x.detach().requires_grad_(backward) for x in inputs], case.bound


def choose(width: int, tile: ForwardTile | BackwardTile) -> None:
    block_shapes._chosen.clear()
    eager.SEEN.clear()
    if isinstance(tile, ForwardTile):
        block_shapes.FORWARD[2, width] = (tile,)
    else:
        block_shapes.BACKWARD[2, width] = block_shapes.BACKWARD_SHORT[2, width] = (tile,)


def call(inputs: list[Tensor], bound: float, tolerance: float | None) -> None:
    out = tra.threshold_relative_attention(*inputs, impl="triton", score_bound=bound, tolerance=tolerance)
    if out.requires_grad:
        torch.autograd.grad(out, inputs, torch.ones_like(out))


def compile_one(width: int, tile: ForwardTile | BackwardTile) -> None:
    choose(width, tile)
    bench_inputs.TOKENS = 2048
    inputs, bound = prepared(width, 2048, isinstance(tile, BackwardTile))
    for tolerance in (None, 0.0):
        call(inputs, bound, tolerance)


def microseconds(inputs: list[Tensor], bound: float, tolerance: float | None) -> dict[str, float]:
    for _ in range(2):
        call(inputs, bound, tolerance)
    times = kernel_times(lambda: call(inputs, bound, tolerance), 6)
    return {name: round(median(found), 1) for name, found in times.items() if name in KERNELS}


def main(shapes: Shapes) -> None:
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.starmap(compile_one, [(width, tile) for width, tiles in shapes.items() for tile in tiles], chunksize=1)
    for width, tiles in shapes.items():
        for length, tolerance in CASES:
            inputs, bound = prepared(width, length, isinstance(tiles[0], BackwardTile))
            for tile in tiles:
                choose(width, tile)
                walk = "full" if tolerance == 0.0 else "early"
                print(width, length, walk, tuple(tile), microseconds(inputs, bound, tolerance), flush=True)


if __name__ == "__main__":
    main({"forward": FORWARD, "backward": BACKWARD}[sys.argv[1]])
