"""Simulate on attention maps whether a bounded cache should evict keys that no query keeps first: RUN...

Two caches of the same memory are compared for each head, on the real maps of trained models:

- window: the cache holds the newest keys;
- unkept first: outside of a window of the newest keys, the oldest key that none of the last queries kept is evicted;
  if there is none, the oldest key of all.

`dropped` is the weight, in the whole map, of keys that are no longer in the query's cache. `shifted` is half the sum of
absolute differences between the weights of the whole map and those over the cache. For a window both are equal; for a
cache with gaps `shifted` is larger, since evicted keys no longer count as distance. `best` is the weight that is
dropped if each query chose its own best keys, which no cache can know beforehand. Only queries of each sequence's
second half are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import command
from tra.evaluation.calibration import Sequences, check_windowed, task_sequences, text_sequences
from tra.ops import AttentionMap, attention_map
from tra.runs import RunFolder, bootstrap_interval, environment
from tra.text import VOCABULARIES
from tra.text.task import Text

SHARES = (2, 4, 8, 16, 32)
"""Sizes of the cache, as divisors of the sequence's length: a half to a 32nd."""

MEMORIES = (8, 32, 128)
"""Numbers of queries after which a key that none of them kept may be evicted."""


class Policy(NamedTuple):
    """A rule that says which key leaves a full cache."""

    name: str
    unkept_for: int | None = None  # queries; None: the oldest key leaves
    newest: float = 1.0  # share of the memory that is kept for the newest keys


POLICIES = (
    Policy("window"),
    *(Policy("unkept first", queries, newest) for newest in (0.5, 0.125) for queries in MEMORIES),
)


class HeadMaps(NamedTuple):
    """The maps of one layer on one sequence, `[H, T, T]`, and δ, `[H, T]`."""

    found: AttentionMap
    log_forget: Tensor


def simulate(kept: Tensor, memory: int, policy: Policy) -> tuple[Tensor, Tensor]:
    """Return which keys each query has in its cache, `[H, T, T]` bool, and how many keys left before older ones, `[H]`.

    Args:
        kept: `[H, T, T]` bool: whether the query (second index) keeps the key in its softmax.
        memory: Keys that the cache of a head holds.
    """
    heads, length, _ = kept.shape
    here = torch.arange(heads)
    slots = torch.full((heads, memory), -1)  # numbers of keys
    last_kept = torch.zeros(heads, memory, dtype=torch.int64)
    held, early = torch.zeros(heads, length, length, dtype=torch.bool), torch.zeros(heads, dtype=torch.int64)
    newest = max(1, round(policy.newest * memory))
    for query in range(length):
        oldest = slots.argmin(-1)
        leaves = oldest
        if policy.unkept_for is not None and query >= memory:
            # the new key is one of the newest
            may_leave = (slots <= query - newest) & (query - 1 - last_kept >= policy.unkept_for)
            unkept = torch.where(may_leave, slots, length).argmin(-1)
            leaves = torch.where(may_leave.any(-1), unkept, oldest)
            early += leaves != oldest
        slots[here, leaves] = query
        last_kept[here, leaves] = query
        is_used = slots >= 0
        index = slots.clamp(min=0)
        held[:, query].scatter_(1, index, is_used)  # free slots point at key 0, which is among the keys then
        held[:, query, 0] = (slots == 0).any(-1)
        last_kept = torch.where(kept[:, query].gather(1, index) & is_used, query, last_kept)
    return held, early


def weights_over(maps: HeadMaps, held: Tensor) -> Tensor:
    """Return the weights over the keys in the cache, `[H, T, T]`. Other keys neither stay nor count."""
    counted = (maps.found.counted & held).to(maps.found.scores.dtype)
    counted_right = counted.flip(-1).cumsum(-1).flip(-1) - counted
    logits = maps.found.scores + maps.log_forget[..., None] * (counted_right + 1)
    logits = logits.masked_fill(~(maps.found.kept & held), -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0)  # a row without keys


def head_maps(model: Any, tokens: Tensor) -> Iterator[HeadMaps]:
    """Yield the maps of each layer on one sequence `[T]`."""
    for layer, x in model.attention_inputs(tokens[None]):
        inputs, log_forget = layer.prepare_inputs(x), layer.log_forget(x)
        found = attention_map(inputs.query, inputs.key, log_forget, threshold=layer.threshold, margin=layer.margin)
        yield HeadMaps(AttentionMap(*(part[0].cpu() for part in found)), log_forget[0].cpu())


def measure(maps: HeadMaps, memory: int, policy: Policy) -> dict[str, Tensor]:
    """Return the means over queries of the second half, `[H]` each."""
    weights, rows = maps.found.weights, slice(maps.found.weights.shape[1] // 2, None)
    held, early = simulate(maps.found.kept, memory, policy)
    dropped = (weights * ~held).sum(-1)[:, rows]
    shifted = (weights - weights_over(maps, held)).abs()[:, rows].sum(-1) / 2
    whole = weights[:, rows].sum(-1) > 0
    # a row whose kept keys have all been evicted has weights of 0: it has lost everything, not a half
    shifted = torch.where(whole & (dropped > 1 - 1e-6), 1.0, shifted)
    best = weights[:, rows].topk(memory, dim=-1).values.sum(-1)
    return {
        "dropped": dropped.mean(-1),
        "shifted": shifted.mean(-1),
        "best": (weights[:, rows].sum(-1) - best).mean(-1),
        "out of turn": early / max(1, weights.shape[1] - memory),
    }


@torch.no_grad()
def bench_eviction(
    run: RunFolder,
    sequences: Sequences,
    shares: Sequence[int] = SHARES,
    policies: Sequence[Policy] = POLICIES,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Return a row for each memory and policy, with means over heads and sequences.

    The 95 % intervals come from resampled sequences.
    """
    check_windowed(run.config().model.mechanism)
    model = run.load_model()
    found: dict[tuple[int, Policy], list[dict[str, Any]]] = {}
    for number, tokens in enumerate(sequences.tokens, start=1):
        progress(f"{run.path.name}, sequence {number} of {len(sequences.tokens)}")
        layers = list(head_maps(model, torch.from_numpy(tokens)))
        for share in shares:
            for policy in policies:
                of_layers = [measure(maps, max(1, len(tokens) // share), policy) for maps in layers]
                by_head = {name: torch.cat([row[name] for row in of_layers]).numpy() for name in of_layers[0]}
                found.setdefault((share, policy), []).append(by_head)
    rows = []
    for (share, policy), measured in found.items():
        row: dict[str, Any] = {"run": run.path.name, "memory": f"1/{share}"} | policy._asdict()
        for name in measured[0]:
            values = np.array([by_head[name].mean() for by_head in measured])
            row[name] = round(float(values.mean()), 6)
            if name in ("dropped", "shifted"):
                row[f"{name}, 95 %"] = [round(end, 6) for end in bootstrap_interval(values, np.ones(len(values)))]
        window = found[share, policies[0]]
        if policy != policies[0]:  # paired by sequence
            by_head = np.stack([b["shifted"] - a["shifted"] for a, b in zip(measured, window, strict=True)])
            gain = by_head.mean(-1)
            ends = bootstrap_interval(gain, np.ones(len(gain)))
            row["shifted less than window, 95 %"] = [round(float(x), 6) + 0.0 for x in (gain.mean(), *ends)]
            row["by layer and head"] = by_head.mean(0).astype(np.float64).round(6).tolist()
        rows.append(row)
    return rows


def open_sequences(run: RunFolder, length: int, count: int, seed: int) -> Sequences:
    """Return pieces of a language model's validation text, or test sequences of the first split of a task."""
    config = run.config()
    task = config.task.build()
    if not isinstance(task, Text):
        return task_sequences(task, config.evaluate, None, count, seed)
    return text_sequences(task.stream("valid"), VOCABULARIES[task.tokenizer], length, count, seed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("eviction", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence of text")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of sequences")
    options = parser.parse_args(arguments)
    rows, about = [], []
    for name in options.runs:
        run = RunFolder.open(name)
        sequences = open_sequences(run, options.length, options.sequences, options.seed)
        facts: dict[str, Any] = {
            "text": sequences.text,
            "source": sequences.source,
            "length": max(map(len, sequences.tokens)),
        }
        facts |= {"sequences": len(sequences.tokens), "trained": run.sessions(), "config": run.config().to_dict()}
        about.append({"run": run.path.name, **facts})
        rows += bench_eviction(run, sequences, progress=command.progress)
    where = environment(torch.device("cpu"))
    command.show({"environment": where, "seed": options.seed, "runs": about, "rows": rows}, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
