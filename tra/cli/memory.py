"""The option --memory: generate with a bounded cache, and report at the end what its guard counted."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tra.cli.options import parse_integer

if TYPE_CHECKING:
    from tra.attention import BoundedCache
    from tra.model import DecoderConfig
    from tra.runs import RunFolder

GUARD_TOLERANCE = 1e-3
"""Weight of keys beyond the window from which the guard counts a query, if no calibration gives another."""


class Memory(NamedTuple):
    """The windows of a bounded cache, and the tolerance of its guard."""

    windows: tuple[int | tuple[int, ...], ...]  # of each layer, or of each of its heads
    tolerance: float

    def range(self) -> tuple[int, int]:
        """Return the smallest and the largest window."""
        each = [window for layer in self.windows for window in _by_head(layer)]
        return min(each), max(each)


def _by_head(layer: int | tuple[int, ...]) -> tuple[int, ...]:
    return (layer,) if isinstance(layer, int) else layer


def choose_memory(asked: str, run: RunFolder) -> Memory:
    """Return the windows that --memory asks for: a number of tokens, `calibrated`, or a file of tra calibrate."""
    from tra.attention import MECHANISMS
    from tra.runs import read_windows

    model = run.config().model
    if not MECHANISMS[model.mechanism].takes_pages:
        raise ValueError(f"{model.mechanism} can't use a bounded cache: it is for TRA and rope")
    if asked == "calibrated" or asked.endswith(".json"):
        file = run.windows_file if asked == "calibrated" else Path(asked)
        found = read_windows(file, run)
        return Memory(tuple(map(tuple, found.windows)), found.tolerance)
    try:
        window = parse_integer(asked)
    except (ValueError, argparse.ArgumentTypeError):
        window = 0
    if window < 1:
        raise ValueError(
            f"--memory takes at least 1 token, 'calibrated', or a .json file of tra calibrate, got {asked!r}"
        )
    return Memory((window,) * model.n_layers, GUARD_TOLERANCE)


def new_cache(memory: Memory, model: DecoderConfig, tokens: int) -> BoundedCache:
    """Return an empty cache of these windows, but for no more than the `tokens` of the text.

    It has a guard where scores have a bound: in TRA with normalised keys.
    """
    from tra.attention import MECHANISMS, BoundedCache, ThresholdRelativeAttention

    guarded = issubclass(MECHANISMS[model.mechanism], ThresholdRelativeAttention) and model.qk_norm is not False
    windows = [
        min(layer, tokens) if isinstance(layer, int) else [min(window, tokens) for window in layer]
        for layer in memory.windows
    ]
    return BoundedCache(len(windows), windows, guard=memory.tolerance if guarded else False)


def is_guarded(cache: BoundedCache) -> bool:
    """Return whether all layers of a cache have a guard."""
    return all(layer.guard is not None for layer in cache.layers)


def guard_row(memory: Memory, cache: BoundedCache) -> dict[str, Any]:
    """Return the part of --json about memory: windows, bytes, and what the guard of each layer counted."""
    row: dict[str, Any] = {"windows": list(memory.windows), "bytes": cache.memory_bytes}
    if is_guarded(cache):
        row |= {"tolerance": memory.tolerance, "guard": cache.unmet_windows()}
    return row


def guard_line(memory: Memory, cache: BoundedCache) -> str:
    """Return a line that gives the windows, and the share of queries that may need older keys."""
    smallest, largest = memory.range()
    sizes = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    of_each = "layer" if isinstance(memory.windows[0], int) else "head"
    line = f"memory: {sizes} tokens in each {of_each}, {cache.memory_bytes / 2**20:.1f} MiB"
    if not is_guarded(cache):
        return line
    rows = cache.unmet_windows()
    queries = sum(
        sum(row["queries"]) if isinstance(row["queries"], list) else row["queries"] * len(row["unmet"]) for row in rows
    )
    if not queries:
        return f"{line}; no text was longer than its window"
    share = sum(sum(row["unmet"]) for row in rows) / queries
    return f"{line}; older keys may have weighed more than {memory.tolerance:g} for {share:.1%} of queries"
