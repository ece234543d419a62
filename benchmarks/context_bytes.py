"""Simulate how many bytes processes that share a sequence receive, with and without the early end. Runs on a CPU.

The rows of some parts walk back over real queries, keys and gates, until the operator's bound says that no older key
counts. How far they walk says which segments their process would have asked for. Nothing is sent.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import command
from tra.bench.inputs import SHIPPED, trained_inputs
from tra.ops import SequenceParts
from tra.ops.context.schedule import Segment, segments_before
from tra.ops.options import default_tolerance
from tra.ops.stop_bound import log_remaining_weight
from tra.runs import RunFolder
from tra.tasks import generator
from tra.tasks.flipflop import FlipFlop
from tra.text.task import Text

LENGTHS, RANKS = (2**14, 2**16, 2**18, 2**20), (8, 64)
HEADS, WIDTH, SEED = 8, 64, 0
SIMULATED_PARTS = 8
"""Parts that are simulated, spread over the sequence. The other parts are assumed to be like them."""
ROWS, KEYS = 256, 512
"""Rows and keys of a block of the simulated walk."""
AGREED_AHEAD = 2
"""Segments that are still asked for after the last one that counts, see `ForwardWalk.run`."""


class Head(NamedTuple):
    """One head of one sequence."""

    query: Tensor  # [T, D]
    key: Tensor
    log_forget: Tensor  # [T]
    kept: float  # smallest fraction of keys that any row keeps; 0 if unknown


class Numbers:
    """A stand-in for a group of processes, which only tells `SequenceParts` the number of ranks."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks = 0, ranks


def random_heads(length: int) -> Iterator[Head]:
    """Yield heads with normalised random queries and keys, and with gates as at initialisation."""
    for head in range(HEADS):
        draws = torch.Generator().manual_seed(SEED + head)
        query, key = (F.rms_norm(torch.randn(length, WIDTH, generator=draws), (WIDTH,)) for _ in range(2))
        yield Head(query, key, F.logsigmoid(torch.randn(length, generator=draws)), 0.25)


def trained_heads(run: str, length: int) -> Iterator[Head]:
    """Yield what the heads of all layers of a trained run compute: on a text, or on a flip-flop sequence."""
    folder = RunFolder.open(run)
    task = folder.config().task.build()
    if isinstance(task, Text):  # a shorter one is read again and again
        tokens = torch.from_numpy(np.resize(task.stream("train").tokens, length).astype(np.int64))[None]
    else:
        tokens = FlipFlop(length + 2).sample("iid", 1, generator(SEED, "bench", device="cpu"), "cpu").tokens
    inputs = trained_inputs(folder, tokens[:, :length])
    tensors = (x.detach().float().flatten(0, 1) for x in (inputs.query, inputs.key, inputs.log_forget))
    for query, key, log_forget in zip(*tensors, strict=True):
        yield Head(query, key, log_forget, 0.0)


def rows_that_matter(head: Head, start: int, stop: int, bound: float) -> Tensor:
    """Return the rows of a part that may need an older key than the part's own.

    These are all rows, or, where many keys are kept, those near enough to the part's start: even with the lowest
    possible logits no row needs more counted keys than the bound of `stop_bound.py` asks for.
    """
    rows = torch.arange(start, stop)
    if head.kept == 0:
        return rows
    slope = head.log_forget[start:stop]
    series = torch.log(1 / -torch.expm1(slope)) + math.log(stop)
    counted = (2 * bound + series - math.log(default_tolerance(torch.float32))) / -slope
    return rows[rows - start <= counted / head.kept + 64]


def oldest_key(head: Head, start: int, stop: int, margin: float, bound: float) -> int:
    """Return the oldest key that the rows of a part have to read; all older keys provably don't count."""
    oldest = start
    for rows in rows_that_matter(head, start, stop, bound).split(ROWS):
        oldest = min(oldest, _oldest_key_of_block(head, rows, margin, bound))
        if oldest == 0:
            break
    return oldest


def _oldest_key_of_block(head: Head, rows: Tensor, margin: float, bound: float) -> int:
    query, slope = head.query[rows] / math.sqrt(head.query.shape[1]), head.log_forget[rows]
    count, log_sum = torch.zeros(len(rows)), torch.full((len(rows),), -torch.inf)
    tolerance = math.log(default_tolerance(torch.float32))
    edge = int(rows[-1]) + 1
    while edge > 0:
        first = max(0, edge - KEYS)
        scores = query @ head.key[first:edge].T
        seen = torch.arange(first, edge) <= rows[:, None]
        counted = seen & (scores > 0)
        up_to = counted.cumsum(-1)
        count = count + up_to[:, -1]
        logits = scores + slope[:, None] * (count[:, None] - up_to + 1)
        logits = logits.masked_fill(~(seen & (scores > -margin)), -torch.inf)
        log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1))
        left = torch.full_like(count, float(first))
        rest = log_remaining_weight(slope, count, left, torch.full_like(count, bound), 0.0 if margin else None)
        going = ~(rest - log_sum < tolerance) & (left > 0)
        edge = first
        if not bool(going.any()):
            break
        rows, query, slope, count, log_sum = (x[going] for x in (rows, query, slope, count, log_sum))
    return edge


def segments_read(segments: Sequence[Segment], starts: Sequence[int], oldest: int) -> list[Segment]:
    """Return the segments that a part asks for if `oldest` is the oldest key that counts for it."""
    needed = next((n + 1 for n, one in enumerate(segments) if starts[one.part] + one.start <= oldest), len(segments))
    return list(segments[: needed + AGREED_AHEAD])


class Cell:
    """One row of the results, to which heads are added."""

    def __init__(self, length: int, ranks: int, margin: float) -> None:
        self.parts = SequenceParts(length, Numbers(ranks))  # type: ignore[arg-type]
        self.length, self.ranks, self.margin = length, ranks, margin
        places = np.linspace(1, self.parts.number - 1, min(SIMULATED_PARTS, self.parts.number - 1))
        self.chosen = sorted({round(x) for x in places})
        self.read = self.all = self.ended = self.walks = 0
        self.reach: list[int] = []

    def add(self, head: Head, bound: float) -> None:
        """Simulate the walks of a head's rows."""
        starts = self.parts.starts
        for part in self.chosen:
            segments = segments_before(self.parts, part)
            oldest = oldest_key(head, starts[part], starts[part + 1], self.margin, bound)
            asked = segments_read(segments, starts, oldest)
            self.read += sum(one.stop - one.start for one in asked)
            self.all += starts[part]
            self.ended += len(asked) < len(segments)
            self.walks += 1
            self.reach.append(starts[part] - oldest)

    def row(self, width: int) -> dict[str, Any]:
        """Return the mean over heads and parts, for the two parts of a process."""
        megabytes = 2 * 2 * width / 2**20  # key and value, two bytes a number
        received, full = 2 * self.read / self.walks, 2 * self.all / self.walks
        return {
            "tokens": self.length,
            "processes": self.ranks,
            "margin": self.margin,
            "reach_median": round(float(np.median(self.reach))),
            "reach_largest": max(self.reach),
            "ended_early": round(self.ended / self.walks, 3),
            "keys_received": round(received),
            "keys_received_full": round(full),
            "share": round(received / full, 4),
            "megabytes_per_head": round(received * megabytes, 3),
            "megabytes_per_head_full": round(full * megabytes, 3),
        }


def bench_context_bytes(
    run: str | None = None,
    lengths: Sequence[int] = LENGTHS,
    margins: Sequence[float] = (0.0, 2.0),
    progress: Callable[[str], None] = command.progress,
) -> dict[str, Any]:
    """Return a row for each length, number of processes and margin."""
    rows: list[dict[str, Any]] = []
    for length in lengths:
        cells = [Cell(length, ranks, margin) for ranks, margin in itertools.product(RANKS, margins)]
        width = 0
        for number, head in enumerate(random_heads(length) if run is None else trained_heads(run, length)):
            progress(f"{length} tokens, head {number}")
            width = head.query.shape[1]
            for cell in cells:
                cell.add(head, math.sqrt(width) * (1 + 2**-7))
        rows += [cell.row(width) for cell in cells]
    environment = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    facts = {"gates": run or "initialisation", "seed": SEED, "simulated_parts": SIMULATED_PARTS}
    return {"environment": environment, **facts, "tolerance": default_tolerance(torch.float32), "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("context_bytes", __doc__)
    parser.add_argument(
        "--run", help=f"a folder of a trained run, or {SHIPPED}, in place of gates as at initialisation"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--margins", type=float, nargs="+", help="0 and 2 by default; of a run, its own")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    margins = options.margins or (0.0, 2.0)
    if options.run is not None and options.margins is None:
        margins = (RunFolder.open(options.run).config().model.margin,)
    found = bench_context_bytes(options.run, options.lengths, margins)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    command.show(found, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
