"""A million tokens in one pass through a bounded cache: RUN. Time per token, memory and errors, from end to end.

A run of flip-flop reads one endless sequence, and is scored at its reads; a language model reads its held-out text
again and again, one text without a break. With --generate a run goes on by itself, token by token. Time is that of the
process on a CPU, which other processes disturb less than a clock, and of a clock on a GPU.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import command
from tra.attention import BoundedCache
from tra.bench.timing import wait_for
from tra.cli.memory import choose_memory
from tra.generation import Sampling, continuation
from tra.model import Decoder
from tra.runs import RunFolder, environment
from tra.tasks import Batch, generator
from tra.tasks.flipflop import FlipFlop
from tra.text.task import Text

TOKENS, BLOCK, CHUNK = 1_000_000, 1000, 250
"""Tokens in all, tokens whose time is taken together, and tokens that are read at a time."""


class Block(NamedTuple):
    """What was found at some neighbouring tokens."""

    seconds: float
    memory: int  # bytes: the most so far that the process has had on a CPU, or that tensors have had on a GPU
    nats: float = 0.0
    right: int = 0
    scored: int = 0


def whole_text(run: RunFolder, tokens: int, seed: int) -> Batch:
    """Return one text of a run's task as a batch of one row."""
    task, cpu = run.config().task.build(), torch.device("cpu")
    if isinstance(task, FlipFlop):
        draws = generator(seed, "long text", device=cpu)
        found = FlipFlop(tokens + tokens % 2).sample("iid", 1, draws, "cpu")
        return Batch(*(x[:, :tokens] for x in found))
    if not isinstance(task, Text):
        raise ValueError(f"{run.path} learnt {task.name}: only flip-flop and text go on without end")
    stream = np.asarray(task.stream("valid").tokens).astype(np.int64)
    ids = torch.from_numpy(np.resize(stream, tokens + 1))[None]
    return Batch(ids[:, :-1], ids[:, 1:], torch.ones(1, tokens, dtype=torch.bool))


def clock(device: torch.device) -> float:
    wait_for(device)
    return time.perf_counter() if device.type == "cuda" else time.process_time()


def memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.no_grad()
def read(model: Decoder, text: Batch, cache: BoundedCache, block: int, chunk: int) -> Iterator[Block]:
    """Yield a block after the other of a text that is read in chunks."""
    device = model.lm_head.weight.device
    for parts in zip(*(x.split(block, dim=1) for x in text), strict=True):
        begun, sums = clock(device), torch.zeros(3, dtype=torch.float64, device=device)
        for tokens, targets, scored in zip(*(x.to(device).split(chunk, dim=1) for x in parts), strict=True):
            logits = model(tokens, None, cache)[scored].float()
            sums[0] += F.cross_entropy(logits, targets[scored], reduction="sum").double()
            sums[1] += (logits.argmax(-1) == targets[scored]).sum()
            sums[2] += scored.sum()
        seconds = clock(device) - begun
        nats, right, number = sums.tolist()
        yield Block(seconds, memory(device), nats, int(right), int(number))


def generate(model: Decoder, prompt: Tensor, tokens: int, cache: BoundedCache, block: int) -> Iterator[Block]:
    """Yield a block after the other of a text that the model draws, one token a step."""
    device = model.lm_head.weight.device
    draws = torch.Generator(device).manual_seed(0)
    columns = continuation(model, prompt.to(device), tokens, sampling=Sampling(1.0), generator=draws, cache=cache)
    for start in range(0, tokens, block):
        begun = clock(device)
        for _ in range(min(block, tokens - start)):
            next(columns)
        yield Block(clock(device) - begun, memory(device))


def summary(blocks: Sequence[Block], tokens: int, block: int, longest: int) -> dict[str, Any]:
    """Return how the end compares with the beginning, once windows of at most `longest` tokens are full."""
    full = -(-longest // block)
    sizes = [block] * (tokens // block)  # a shorter last block is not compared
    times = [1e6 * one.seconds / size for one, size in zip(blocks, sizes, strict=False)]
    tenth = max(1, (len(times) - full) // 10)
    if len(times) < full + 2:
        raise ValueError(f"{tokens:,} tokens are too few: windows of {longest:,} must be full after a part of them")
    first, last = (statistics.median(part) for part in (times[full : full + tenth], times[-tenth:]))
    found: dict[str, Any] = {
        "us_per_token_first": round(times[full], 3),
        "us_per_token_last": round(times[-1], 3),
        "us_per_token_first_tenth": round(first, 3),
        "us_per_token_last_tenth": round(last, 3),
        "last_over_first_tenth": round(last / first, 4),
        "us_per_token_fastest_first_tenth": round(min(times[full : full + tenth]), 3),
        "us_per_token_fastest_last_tenth": round(min(times[-tenth:]), 3),
        "memory_first": blocks[full].memory,
        "memory_last": blocks[-1].memory,
    }
    scored = sum(one.scored for one in blocks)
    if scored:
        halves = (blocks, blocks[full : full + tenth], blocks[-tenth:])
        for name, part in zip(("", "_first_tenth", "_last_tenth"), halves, strict=True):
            number = max(1, sum(one.scored for one in part))
            found[f"right{name}"] = round(sum(one.right for one in part) / number, 6)
            found[f"nats{name}"] = round(sum(one.nats for one in part) / number, 6)
    return found | {"scored": scored}


def bench_long_text(
    run: RunFolder,
    device: torch.device,
    *,
    asked: str = "256",
    tokens: int = TOKENS,
    block: int = BLOCK,
    generates: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return one row: the summary, and time per token and memory of every block."""
    memory = choose_memory(asked, run)
    windows = memory.windows
    model, cache = run.load_model(device).eval(), BoundedCache(len(windows), windows, chunk=CHUNK)
    text = whole_text(run, block if generates else tokens, seed)
    found = generate(model, text.tokens[:, :8], tokens, cache, block) if generates else read(
        model, text, cache, block, CHUNK
    )  # fmt: skip
    blocks, held = [], set()
    for one in found:
        blocks.append(one)
        held.add(cache.memory_bytes)
        if len(blocks) % 50 == 0:
            progress(f"{len(blocks) * block:,} of {tokens:,} tokens")
    assert len(held) == 1, "the cache has grown"
    row: dict[str, Any] = {"way": "generated" if generates else "read", "tokens": tokens, "windows": list(windows)}
    row |= {"cache_bytes": held.pop()} | summary(blocks, tokens, block, memory.range()[1])
    series = {
        "us_per_token": [round(1e6 * one.seconds / block, 2) for one in blocks],
        "memory": [one.memory for one in blocks],
    }
    facts = {"run": run.path.name, "config": run.config().to_dict(), "trained": run.sessions()}
    facts |= {"block": block, "chunk": CHUNK, "seed": seed, "clock": "clock" if device.type == "cuda" else "process"}
    return {"environment": environment(device)} | facts | {"rows": [row], "blocks": series}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("long_text", __doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--memory", default="256", help="as of tra generate: tokens, calibrated, or a file")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--generate", action="store_true", help="go on token by token in place of reading")
    parser.add_argument("--seed", type=int, default=0, help="of the flip-flop sequence")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    if options.tokens < 2 * BLOCK:
        raise ValueError(f"--tokens must be at least {2 * BLOCK:,}, got {options.tokens:,}")
    device = command.pick_device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    found = bench_long_text(
        RunFolder.open(options.run),
        device,
        asked=options.memory,
        tokens=options.tokens,
        generates=options.generate,
        seed=options.seed,
        progress=lambda done: print(done, file=sys.stderr),
    )
    if options.out is not None:
        options.out.write_text(json.dumps(found) + "\n")
    command.show(found, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
