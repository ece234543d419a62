"""Block shapes ("tiles") of the kernels: a short list per head width, of which the first that fits the device is taken.

What fits depends on shared memory, never on a GPU's name, and the last of every list fits any GPU since Ampere. The
order was measured on an H200. With `TRA_AUTOTUNE=1` the first call of a kind (dtype, width, length up to the next
power of two) measures the whole list instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch


class ForwardTile(NamedTuple):
    """Rows and keys of a block, warps, stages of the software pipeline, and a limit on a thread's registers.

    With the limit a processor holds one more block at once; it is set where that spills hardly any registers.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int = 0

    def shared_memory(self, width: int, value_width: int, itemsize: int) -> int:
        """Estimate the bytes: a query block, `stages` blocks of keys and values, the triangle."""
        return (self.rows * width + self.stages * self.keys * (width + value_width)) * itemsize + self.keys**2 * 2


class BackwardTile(NamedTuple):
    """The same for the two backward kernels.

    The kernel of queries holds `rows` and walks by `query_keys`; that of keys holds `keys` and walks by `key_rows`.
    """

    keys: int
    rows: int
    query_keys: int
    query_warps: int
    query_stages: int
    key_rows: int
    key_warps: int
    key_stages: int
    query_registers: int = 0

    def shared_memory(self, width: int, value_width: int, itemsize: int) -> int:
        both = (width + value_width) * itemsize
        queries = (self.rows + self.query_stages * self.query_keys) * both + self.query_keys**2 * 2
        keys = (self.keys + self.key_stages * self.key_rows) * both + self.keys * (self.keys + self.key_rows) * 2
        return max(queries, keys)


FORWARD: dict[tuple[int, int], tuple[ForwardTile, ...]] = {
    # (bytes per number, widest head): best first
    (2, 64): (ForwardTile(64, 32, 4, 3, 128), ForwardTile(64, 64, 4, 3), ForwardTile(64, 32, 4, 2)),
    (2, 128): (ForwardTile(64, 32, 4, 3, 168), ForwardTile(128, 64, 8, 3), ForwardTile(64, 32, 4, 2)),
    (2, 256): (ForwardTile(128, 32, 8, 2), ForwardTile(64, 32, 4, 2), ForwardTile(32, 32, 4, 1)),
    (4, 64): (ForwardTile(32, 32, 4, 2), ForwardTile(32, 16, 4, 1)),
    (4, 128): (ForwardTile(32, 32, 4, 2), ForwardTile(16, 16, 4, 1)),
    (4, 256): (ForwardTile(16, 16, 4, 2), ForwardTile(16, 16, 4, 1)),
}
BACKWARD: dict[tuple[int, int], tuple[BackwardTile, ...]] = {
    (2, 64): (
        BackwardTile(64, 64, 64, 4, 3, 64, 4, 3),
        BackwardTile(64, 64, 64, 4, 2, 32, 4, 2),
        BackwardTile(32, 64, 32, 4, 2, 64, 4, 1),
    ),
    (2, 128): (
        BackwardTile(128, 128, 64, 8, 3, 32, 8, 3),
        BackwardTile(64, 64, 64, 4, 2, 32, 4, 3),
        BackwardTile(32, 64, 32, 4, 2, 32, 4, 2),
        BackwardTile(32, 32, 32, 4, 1, 32, 4, 1),
    ),
    (2, 256): (BackwardTile(32, 64, 32, 8, 2, 32, 8, 2), BackwardTile(32, 32, 32, 4, 1, 32, 4, 1)),
    (4, 64): (BackwardTile(32, 32, 32, 4, 2, 32, 4, 2), BackwardTile(16, 32, 16, 4, 1, 32, 4, 1)),
    (4, 128): (BackwardTile(32, 32, 32, 4, 1, 32, 4, 1), BackwardTile(16, 16, 16, 4, 1, 16, 4, 1)),
    (4, 256): (BackwardTile(16, 16, 16, 4, 1, 16, 4, 1),),
}
BACKWARD_SHORT = BACKWARD | {
    (2, 64): (BackwardTile(64, 64, 32, 4, 3, 64, 4, 3, 168), *BACKWARD[2, 64][1:]),
    (2, 128): (BackwardTile(128, 64, 32, 4, 3, 32, 8, 3), *BACKWARD[2, 128][1:]),
}
"""For short walks: small blocks compute less that is masked."""
INTERPRETED = (ForwardTile(64, 32, 4, 1), BackwardTile(64, 32, 32, 4, 1, 16, 1, 1))
"""On a CPU nothing has to fit; unequal sides find more mistakes."""

MIN_SHARED_MEMORY = 99 << 10
"""Bytes of shared memory that any GPU since Ampere has. PyTorch reports it for NVIDIA's only."""

Tile = TypeVar("Tile", ForwardTile, BackwardTile)
_chosen: dict[Hashable, ForwardTile | BackwardTile] = {}


def candidates(
    table: dict[tuple[int, int], tuple[Tile, ...]], width: int, value_width: int, itemsize: int, device: torch.device
) -> Sequence[Tile]:
    """Return the list for a head width, without what surely doesn't fit the device."""
    if device.type == "cpu":
        return tuple(tile for tile in INTERPRETED if isinstance(tile, type(next(iter(table.values()))[0])))
    listed = next(
        tiles for (size, widest), tiles in table.items() if size == itemsize and max(width, value_width) <= widest
    )
    available: int = getattr(
        torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", MIN_SHARED_MEMORY
    )
    fitting = [tile for tile in listed if tile.shared_memory(width, value_width, itemsize) <= available]
    return fitting or listed[-1:]


def run(kind: Hashable, length: int, tiles: Sequence[Tile], launch: Callable[[Tile], None]) -> None:
    """Launch with the tile chosen for this kind of call; the first call may launch several times to choose it."""
    tune = os.environ.get("TRA_AUTOTUNE", "0") not in ("", "0")
    kind = (kind, type(tiles[0]), length.bit_length() if tune else None)
    if kind in _chosen:
        launch(_chosen[kind])  # type: ignore[arg-type]
    elif tune and len(tiles) > 1 and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        _chosen[kind] = min(tiles, key=lambda tile: _milliseconds(lambda: launch(tile)))
        launch(_chosen[kind])  # type: ignore[arg-type]
    else:
        _chosen[kind] = _first_that_runs(tiles, launch)


def _first_that_runs(tiles: Sequence[Tile], launch: Callable[[Tile], None]) -> Tile:
    from triton.runtime.errors import OutOfResources

    for tile in tiles[:-1]:
        try:
            launch(tile)
        except OutOfResources:
            continue
        return tile
    launch(tiles[-1])
    return tiles[-1]


def _milliseconds(call: Callable[[], None]) -> float:
    from triton.runtime.errors import OutOfResources

    try:
        call()
    except OutOfResources:
        return float("inf")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
