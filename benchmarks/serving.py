"""Compare serving from a pool of pages with padded batches in static caches, on requests of mixed lengths.

Tokens per second count only the tokens that requests asked for. A padded batch runs until its longest request is
finished, with prompts padded to the longest one. A server replaces each request as soon as it is finished. Both decode
the same number of rows at once. Weights are random.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import command
from tra.bench.timing import wait_for
from tra.generation import Request, serve
from tra.model import Decoder, DecoderConfig
from tra.runs import environment


class Plan(NamedTuple):
    """The model and the requests that are measured."""

    size: str
    vocabulary: int
    requests: int
    rows: int
    """Requests that are decoded at once."""
    prompts: tuple[int, int]
    """Fewest and most tokens of a prompt; lengths between are drawn log-uniformly."""
    new: tuple[int, int]
    """Fewest and most new tokens, drawn in the same way."""
    shared: int
    """Tokens that all prompts have in common, at their start."""
    dtype: torch.dtype


ON_GPU = Plan("medium", 50_304, 256, 32, (32, 4096), (16, 1024), 0, torch.bfloat16)
ON_CPU = Plan("tiny", 256, 12, 4, (8, 200), (4, 60), 0, torch.float32)


def draw_requests(plan: Plan, seed: int = 0) -> list[Request]:
    """Return requests with lengths drawn log-uniformly."""
    draws = random.Random(seed)

    def length(limits: tuple[int, int]) -> int:
        return round(math.exp(draws.uniform(*map(math.log, limits))))

    shared = draws.choices(range(plan.vocabulary), k=plan.shared)
    return [
        Request(shared + draws.choices(range(plan.vocabulary), k=length(plan.prompts)), length(plan.new))
        for _ in range(plan.requests)
    ]


def run_server(model: Decoder, requests: Sequence[Request], plan: Plan) -> int:
    """Serve all requests, and return the pool's capacity in tokens."""
    most = max(-(-(len(request.tokens) + request.max_new_tokens) // 64) for request in requests)
    pages = max(most, most * plan.rows // 2)  # half of what rows of the longest would need
    for _ in serve(model, requests, pages, max_rows=plan.rows):
        pass
    return pages * 64


def run_padded(model: Decoder, requests: Sequence[Request], plan: Plan) -> int:
    """Generate batch after batch, in the order of the requests; return the largest capacity of a cache in tokens."""
    device, held = model.lm_head.weight.device, 0
    for start in range(0, len(requests), plan.rows):
        batch = requests[start : start + plan.rows]
        longest, new = max(len(r.tokens) for r in batch), max(r.max_new_tokens for r in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.tokens) :] = torch.tensor(request.tokens)
            mask[row, longest - len(request.tokens) :] = True
        model.generate(ids.to(device), new, mask.to(device), capacity="static")
        held = max(held, len(batch) * (longest + new))
    return held


WAYS: dict[str, Callable[[Decoder, Sequence[Request], Plan], int]] = {"served": run_server, "padded": run_padded}


def bench_serving(
    device: torch.device,
    mechanisms: Sequence[str] = ("tra", "rope"),
    plan: Plan | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return a row for each mechanism and way: tokens per second in all, and tokens that the cache has room for."""
    plan = plan or (ON_GPU if device.type == "cuda" else ON_CPU)
    requests, rows = draw_requests(plan), []
    asked = sum(request.max_new_tokens for request in requests)
    for mechanism in mechanisms:
        torch.manual_seed(0)
        config = getattr(DecoderConfig, plan.size)(plan.vocabulary, mechanism=mechanism)
        model = Decoder(config).to(device, plan.dtype).eval()
        for name, way in WAYS.items():
            progress(f"{mechanism}, {name}")
            way(model, requests[: plan.rows], plan)  # compiles, and warms up
            wait_for(device)
            start = time.perf_counter()
            held = way(model, requests, plan)
            wait_for(device)
            seconds = time.perf_counter() - start
            rows.append({
                "mechanism": mechanism, "way": name, "tokens_per_second": round(asked / seconds, 1),
                "seconds": round(seconds, 3), "tokens": asked, "tokens_held": held,
            })  # fmt: skip
    facts = plan._asdict() | {"dtype": str(plan.dtype).removeprefix("torch.")}
    return {"environment": environment(device), "plan": facts, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    options = command.parser("serving", __doc__).parse_args(arguments)
    command.show(bench_serving(command.pick_device(options.device), progress=command.progress), options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
