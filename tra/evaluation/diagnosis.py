"""The two failures of attention, measured: mass on keys that don't matter, and position that overrules content.

Content is the scaled product of query and key before position enters, and what a mechanism orders keys by in the end
are its logits (see `tra.attention.WeightMap`). Looked at are queries at which an answer is due, in full precision:

- `negative_mass`: the share of the attention weights, by absolute value, on keys whose content score is negative.
- `reversed`: of pairs of keys that content tells apart, the share that ends up in the other order. A pair of which both
  keys are dropped is not reversed, so this is small where most keys are dropped;
- `reversed_kept`: the same, of pairs that are both kept.
- `lifted`: the same, of pairs with a positive and a negative content score: a key that doesn't matter stands above
  one that does.

What stands between content and order is position, but for selective attention also its masking. Order has no meaning
where content can't be told apart from position (sinusoidal) or a second map is taken off (differential). The own key of
stick-breaking gets what is left, whatever its content, and its mass is counted by the sign of its score all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tra.attention import MECHANISMS, Attention, ThresholdRelativeAttention, WeightMap
from tra.attention.shared.forget_gate import ForgetGate
from tra.config import EvalConfig
from tra.evaluation.exact_match import chosen_splits, draw_test_set
from tra.model import Decoder
from tra.runs import RunFolder, put_row
from tra.tasks import Task, generator
from tra.text.task import Stream

SEQUENCES, QUERIES, PAIRS = 32, 32, 256
"""Test sequences per split, queries looked at in each, and pairs of keys drawn per query and head."""

WINDOWS_OF_TEXT, BLOCKS, BLOCK = 8, 4, 64
"""Of text: windows of a size, spread over it, and blocks of neighbouring queries in each, as many as kernels take."""

PerHead = list[list[float | None]]


@dataclass(frozen=True)
class Diagnosis:
    """One line of diagnose.jsonl. Measures are lists by layer of lists by head, None where there was nothing to see."""

    split: str
    shortest: int
    longest: int
    sequences: int
    queries: int
    negative_mass: PerHead
    reversed: PerHead | None
    reversed_kept: PerHead | None
    lifted: PerHead | None
    kept: PerHead | None
    """Fraction of visible keys kept, of mechanisms with a threshold."""
    null: PerHead | None
    """Fraction of queries that keep none."""
    log_forget: PerHead | None
    """Mean of the gate, of mechanisms that have one."""
    reach: PerHead | None
    """Tokens TRA looks back until the rest provably doesn't count."""
    seed: int
    device: str
    seconds: float
    walked: PerHead | None = None
    """Of text: the share of the keys before a block of 64 queries that TRA has to read for them."""


class Looked(NamedTuple):
    """A sequence, and where in it to look."""

    tokens: Tensor  # [1, T]
    rows: Tensor  # [R], queries
    pairs: Tensor  # [2, R, PAIRS], keys
    block: int | None = None  # rows come in blocks of so many neighbours


def diagnose_task(
    model: Decoder,
    task: Task,
    config: EvalConfig,
    *,
    splits: Sequence[str] = (),
    seed: int = 0,
    device: torch.device | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[Diagnosis]:
    """Split by split, as they come. The sequences are the first of those that evaluation looks at."""
    device = torch.device("cpu") if device is None else device
    _check_attention(model)
    model.eval()
    with exact_products():
        yield from _diagnose(model, task, config, splits, seed, device, progress)


def _check_attention(model: Decoder) -> None:
    if MECHANISMS[model.config.mechanism].replaces_mlp:
        raise ValueError(f"{model.config.mechanism} has no attention to diagnose")


@contextmanager
def exact_products() -> Iterator[None]:
    """No TF32, which training may have allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _diagnose(
    model: Decoder,
    task: Task,
    config: EvalConfig,
    splits: Sequence[str],
    seed: int,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> Iterator[Diagnosis]:
    def sequences(split: str) -> Iterator[Looked]:
        for number, batch in enumerate(draw_test_set(task, split, SEQUENCES, seed, 1, device)):
            drawing = generator(seed, f"diagnose/{split}", number, device)
            rows = batch.loss_mask[0].nonzero()[:, 0]
            rows = rows[torch.randperm(len(rows), generator=drawing, device=device)[:QUERIES]]
            yield Looked(batch.tokens, rows, _pairs(rows, drawing))
            progress(split, number + 1, SEQUENCES)

    for split, (shortest, longest) in chosen_splits(task, config, splits).items():
        yield _measured(model, split, (shortest, longest), sequences(split), seed, device)


def diagnose_text(
    model: Decoder,
    stream: Stream,
    windows: Sequence[int],
    *,
    seed: int = 0,
    device: torch.device | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[Diagnosis]:
    """The same on text, window by window, at any query; and what the early stop of TRA saves."""
    device = torch.device("cpu") if device is None else device
    _check_attention(model)
    model.eval()

    def sequences(window: int, split: str) -> Iterator[Looked]:
        starts = np.linspace(0, len(stream.tokens) - window - 1, WINDOWS_OF_TEXT).astype(int)
        for number, start in enumerate(starts):
            drawing = generator(seed, f"diagnose/{split}", number, device)
            ids = np.asarray(stream.tokens[start : start + window]).astype(np.int64)
            blocks = torch.randperm(window // BLOCK, generator=drawing, device=device)[:BLOCKS]
            rows = (BLOCK * blocks[:, None] + torch.arange(BLOCK, device=device)).flatten()
            yield Looked(torch.from_numpy(ids)[None].to(device), rows, _pairs(rows, drawing), BLOCK)
            progress(split, number + 1, len(starts))

    with exact_products():
        for window in windows:
            if not BLOCK <= window < len(stream.tokens):
                raise ValueError(
                    f"a diagnosis takes windows of {BLOCK} up to {len(stream.tokens) - 1:,} tokens of {stream.name}, "
                    f"got {window:,}"
                )
            split = f"{stream.name}/{window}"
            yield _measured(model, split, (window, window), sequences(window, split), seed, device)


def _pairs(rows: Tensor, drawing: torch.Generator) -> Tensor:
    drawn = torch.rand(2, len(rows), PAIRS, generator=drawing, device=rows.device)
    return (drawn * (rows[:, None] + 1)).long()


def _measured(
    model: Decoder,
    split: str,
    lengths: tuple[int, int],
    sequences: Iterator[Looked],
    seed: int,
    device: torch.device,
) -> Diagnosis:
    begun, sums, queries, seen = time.monotonic(), _Sums(), 0, 0
    for looked in sequences:
        for index, (layer, x) in enumerate(model.attention_inputs(looked.tokens)):
            sums.add(index, look(layer, x, looked.rows, looked.pairs, looked.block))
        queries += len(looked.rows)
        seen += 1
    found = sums.ratios()
    order = MECHANISMS[model.config.mechanism].orders_by_content
    return Diagnosis(
        split=split,
        shortest=lengths[0],
        longest=lengths[1],
        sequences=seen,
        queries=queries,
        negative_mass=found["negative_mass"],
        reversed=found["reversed"] if order else None,
        reversed_kept=found["reversed_kept"] if order else None,
        lifted=found["lifted"] if order else None,
        kept=found.get("kept"),
        null=found.get("null"),
        log_forget=found.get("log_forget"),
        reach=found.get("reach"),
        seed=seed,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        seconds=round(time.monotonic() - begun, 2),
        walked=found.get("walked"),
    )


def diagnose_run(run: RunFolder, results: Iterator[Diagnosis]) -> Iterator[Diagnosis]:
    """Write each result to diagnose.jsonl as it comes."""
    for result in results:
        put_row(run.diagnosis_file, asdict(result), ("split", "seed"))
        yield result


def look(
    layer: Attention, x: Tensor, rows: Tensor, pairs: Tensor, block: int | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Measure one layer on one sequence: by name what was counted, and out of how much, `[H]` each.

    Args:
        x: The layer's input, `[1, T, d_model]`.
        rows: `[R]`, the queries to look at.
        pairs: `[2, R, P]`, keys that each of them sees.
        block: Rows come in blocks of so many neighbours, whose common walk is measured too.
    """
    found = layer.attention_map(x, rows=rows)
    total = found.weights.abs().sum(-1)
    negative = (found.weights.abs() * (found.content < 0)).sum(-1)
    everything = torch.ones_like(total)
    measures = {
        "negative_mass": (torch.where(total > 0, negative / total, 0.0), total > 0),
        "reversed": _order(found, pairs, torch.ne),
        "lifted": _order(found, pairs, lambda first, second: first * second < 0),
        "reversed_kept": _order(found, pairs, torch.ne, kept_only=True),
    }
    if hasattr(layer, "threshold"):
        kept = found.logits > -torch.inf
        measures["kept"] = kept.sum(-1), everything * (rows + 1)
        measures["null"] = ~kept.any(-1), everything
    if isinstance(gate := getattr(layer, "gate", None), ForgetGate):
        measures["log_forget"] = gate(x)[:, :, rows], everything
    if isinstance(layer, ThresholdRelativeAttention):
        reach = layer.reach(x, found.logits, rows)
        measures["reach"] = reach, everything
        if block is not None:
            furthest = (rows - reach + 1).unflatten(-1, (-1, block)).amin(-1)  # the first key that some row needs
            behind = (rows.unflatten(0, (-1, block))[:, -1] + 1).expand_as(furthest)
            measures["walked"] = behind - furthest, behind
    return {name: (_over_rows(part), _over_rows(whole)) for name, (part, whole) in measures.items()}


def _order(
    found: WeightMap, pairs: Tensor, told_apart: Callable[[Tensor, Tensor], Tensor], kept_only: bool = False
) -> tuple[Tensor, Tensor]:
    """Pairs in the other order than content's, and pairs that count, `[1, H, R, P]` bool."""
    index = pairs[:, None, None].expand(-1, *found.content.shape[:2], -1, -1)
    (first, second), (high, low) = (
        [scores.gather(-1, side) for side in index] for scores in (found.content, found.logits)
    )
    counted = told_apart(first, second) & (first != second)
    if kept_only:
        counted &= (high > -torch.inf) & (low > -torch.inf)
    return counted & ((first > second) & (high < low) | (first < second) & (high > low)), counted


def _over_rows(x: Tensor) -> Tensor:
    """`[1, H, …]` -> `[H]`."""
    return x.double().flatten(2).sum((0, 2))


class _Sums:
    """Sums by measure and layer, `[H]` each."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[int, list[Tensor]]] = {}

    def add(self, layer: int, measures: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, found in measures.items():
            held = self.sums.setdefault(name, {}).setdefault(layer, [torch.zeros_like(x) for x in found])
            for total, new in zip(held, found, strict=True):
                total += new

    def ratios(self) -> dict[str, PerHead]:
        return {
            name: [
                [round(a / b, 6) if b else None for a, b in zip(part.tolist(), whole.tolist(), strict=True)]
                for part, whole in layers.values()
            ]
            for name, layers in self.sums.items()
        }
