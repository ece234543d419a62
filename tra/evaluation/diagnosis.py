"""Two failures of attention, measured: weight on keys that don't matter, and position that overrules content.

Content is the scaled product of query and key, without position. The order in which a mechanism finally ranks keys is
that of its logits (see `tra.attention.WeightMap`). Only queries at which an answer is due are measured, in full
precision:

- `negative_mass`: the share of the attention weights, by absolute value, on keys whose content score is negative. TRA
  has such keys if its threshold or margin lets them stay.
- `reversed`: among pairs of keys with different content scores, the share whose logits have the opposite order. A pair
  of two dropped keys is not reversed, so this is small where most keys are dropped.
- `reversed_kept`: the same share among pairs of two kept keys.
- `lifted`: the same share among pairs with a positive and a negative content score: a key that doesn't matter ranks
  above one that does.

Position is what changes the order from that of content, in selective attention also its masking. The measures of order
are None where content can't be separated from position (sinusoidal), or a second map is subtracted (differential).
Stick-breaking gives the query's own key the remaining weight, whatever its content; that key is still counted by the
sign of its score.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tra.attention import MECHANISMS, Attention, ThresholdRelativeAttention, WeightMap
from tra.attention.shared.forget_gate import ForgetGate
from tra.config import EvalConfig
from tra.evaluation.exact_match import chosen_splits, draw_test_set
from tra.model import Decoder
from tra.runs import RunFolder, put_row
from tra.tasks import Lengths, Task, generator
from tra.text.task import Stream
from tra.training.device import device_name, matmul_precision

SEQUENCES, QUERIES, PAIRS = 32, 32, 256
"""Test sequences of a split, queries measured in each, and pairs of keys drawn per query and head."""

WINDOWS_OF_TEXT, BLOCKS, BLOCK = 8, 4, 64
"""Windows spread over a text, blocks measured in each, and neighbouring queries in a block, as many as kernels take."""

ORDER_MEASURES = ("reversed", "reversed_kept", "lifted")
MEASURES = ("negative_mass", *ORDER_MEASURES, "kept", "counted", "null", "log_forget", "reach", "walked")

PerHead = list[list[float | None]]


@dataclass(frozen=True)
class Diagnosis:
    """One line of diagnose.jsonl. Measures are lists by layer of lists by head, None where nothing could be counted."""

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
    """Fraction of visible keys that stay in the softmax, for mechanisms with a threshold."""
    null: PerHead | None
    """Fraction of queries that keep no key."""
    log_forget: PerHead | None
    """Mean of the gate, of mechanisms that have one."""
    reach: PerHead | None
    """Tokens TRA looks back until the rest provably doesn't count."""
    seed: int
    device: str
    seconds: float
    walked: PerHead | None = None
    """Of text: the share of the keys before a block of 64 queries that TRA has to read for them."""
    counted: PerHead | None = None
    """Fraction of visible keys that count as distance in TRA: without a margin, all kept keys."""


class Sample(NamedTuple):
    """A sequence, and the queries and pairs of keys to measure in it."""

    tokens: Tensor  # [1, T]
    rows: Tensor  # [R], queries
    pairs: Tensor  # [2, R, PAIRS], keys that the queries see
    block: int | None = None  # neighbouring queries that form a block, if rows come in blocks


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
    """Yield the diagnosis of each split as soon as it is measured, on the first sequences of its test set."""
    device = torch.device("cpu") if device is None else device

    def samples(split: str) -> Iterator[Sample]:
        for number, batch in enumerate(draw_test_set(task, split, SEQUENCES, seed, 1, device)):
            drawing = generator(seed, f"diagnose/{split}", number, device)
            rows = batch.loss_mask[0].nonzero()[:, 0]
            rows = rows[torch.randperm(len(rows), generator=drawing, device=device)[:QUERIES]]
            yield Sample(batch.tokens, rows, _draw_pairs(rows, drawing))
            progress(split, number + 1, SEQUENCES)

    _check_attention(model)
    for split, lengths in chosen_splits(task, config, splits).items():
        yield _measure(model, split, lengths, samples(split), seed, device)


def diagnose_text(
    model: Decoder,
    stream: Stream,
    windows: Sequence[int],
    *,
    seed: int = 0,
    device: torch.device | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[Diagnosis]:
    """Yield the diagnosis of each window of a text, at blocks of any queries, with what TRA's early stop saves."""
    device = torch.device("cpu") if device is None else device

    def samples(window: int, split: str) -> Iterator[Sample]:
        starts = np.linspace(0, len(stream.tokens) - window - 1, WINDOWS_OF_TEXT).astype(int)
        for number, start in enumerate(starts):
            drawing = generator(seed, f"diagnose/{split}", number, device)
            ids = np.asarray(stream.tokens[start : start + window]).astype(np.int64)
            blocks = torch.randperm(window // BLOCK, generator=drawing, device=device)[:BLOCKS]
            rows = (BLOCK * blocks[:, None] + torch.arange(BLOCK, device=device)).flatten()
            yield Sample(torch.from_numpy(ids)[None].to(device), rows, _draw_pairs(rows, drawing), BLOCK)
            progress(split, number + 1, len(starts))

    _check_attention(model)
    for window in windows:
        if not BLOCK <= window < len(stream.tokens):
            raise ValueError(
                f"a diagnosis takes windows of {BLOCK} up to {len(stream.tokens) - 1:,} tokens of {stream.name}, "
                f"got {window:,}"
            )
        split = f"{stream.name}/{window}"
        yield _measure(model, split, Lengths(window, window), samples(window, split), seed, device)


def diagnose_run(run: RunFolder, results: Iterator[Diagnosis]) -> Iterator[Diagnosis]:
    """Write each result to diagnose.jsonl before passing it on."""
    for result in results:
        put_row(run.diagnosis_file, asdict(result), ("split", "seed"))
        yield result


def _check_attention(model: Decoder) -> None:
    if MECHANISMS[model.config.mechanism].replaces_mlp:
        raise ValueError(f"{model.config.mechanism} has no attention to diagnose")


def _draw_pairs(rows: Tensor, drawing: torch.Generator) -> Tensor:
    """Draw pairs of keys that each query sees, `[2, R, PAIRS]`."""
    drawn = torch.rand(2, len(rows), PAIRS, generator=drawing, device=rows.device)
    return (drawn * (rows[:, None] + 1)).long()


def _measure(
    model: Decoder, split: str, lengths: Lengths, samples: Iterable[Sample], seed: int, device: torch.device
) -> Diagnosis:
    begun, sums, queries, sequences = time.monotonic(), _Sums(), 0, 0
    model.eval()
    with matmul_precision("highest"):  # without TF32, which training may have allowed
        for sample in samples:
            for index, (layer, x) in enumerate(model.attention_inputs(sample.tokens)):
                sums.add(index, measure_layer(layer, x, sample.rows, sample.pairs, sample.block))
            queries += len(sample.rows)
            sequences += 1
    found = sums.ratios()
    if not MECHANISMS[model.config.mechanism].orders_by_content:
        found = {name: values for name, values in found.items() if name not in ORDER_MEASURES}
    measures: dict[str, Any] = {name: found.get(name) for name in MEASURES}
    seconds = round(time.monotonic() - begun, 2)
    return Diagnosis(
        split,
        lengths.shortest,
        lengths.longest,
        sequences,
        queries,
        seed=seed,
        device=device_name(device),
        seconds=seconds,
        **measures,
    )


def measure_layer(
    layer: Attention, x: Tensor, rows: Tensor, pairs: Tensor, block: int | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Measure one layer on one sequence: return by name a count and what it is a share of, `[H]` each.

    Args:
        x: The layer's input, `[1, T, d_model]`.
        rows: `[R]`, the queries to measure.
        pairs: `[2, R, P]`, keys that each query sees.
        block: Neighbouring queries in a block, if rows come in blocks; then the keys that a block reads are measured.
    """
    found = layer.attention_map(x, rows=rows)
    total = found.weights.abs().sum(-1)
    negative = (found.weights.abs() * (found.content < 0)).sum(-1)
    ones = torch.ones_like(total)
    measures = {
        "negative_mass": (torch.where(total > 0, negative / total, 0.0), total > 0),
        "reversed": _count_reversed(found, pairs, torch.ne),
        "lifted": _count_reversed(found, pairs, lambda first, second: first * second < 0),
        "reversed_kept": _count_reversed(found, pairs, torch.ne, kept_only=True),
    }
    if hasattr(layer, "threshold"):
        kept = found.logits > -torch.inf
        measures["kept"] = kept.sum(-1), ones * (rows + 1)
        measures["null"] = ~kept.any(-1), ones
    if isinstance(gate := getattr(layer, "gate", None), ForgetGate):
        measures["log_forget"] = gate(x)[:, :, rows], ones
    if isinstance(layer, ThresholdRelativeAttention):
        measures["counted"] = layer.counted_keys(x, found.logits, rows).sum(-1), ones * (rows + 1)
        reach = layer.reach(x, found.logits, rows)
        measures["reach"] = reach, ones
        if block is not None:
            first_key = (rows - reach + 1).unflatten(-1, (-1, block)).amin(-1)  # that any query of the block needs
            visible = (rows.unflatten(0, (-1, block))[:, -1] + 1).expand_as(first_key)
            measures["walked"] = visible - first_key, visible
    return {name: (_sum_by_head(part), _sum_by_head(whole)) for name, (part, whole) in measures.items()}


def _count_reversed(
    found: WeightMap, pairs: Tensor, counts: Callable[[Tensor, Tensor], Tensor], kept_only: bool = False
) -> tuple[Tensor, Tensor]:
    """Return which pairs the logits order against their content, and which pairs count, `[1, H, R, P]` bool."""
    index = pairs[:, None, None].expand(-1, *found.content.shape[:2], -1, -1)
    (content, other_content), (logit, other_logit) = (
        [scores.gather(-1, side) for side in index] for scores in (found.content, found.logits)
    )
    counted = counts(content, other_content) & (content != other_content)
    if kept_only:
        counted &= (logit > -torch.inf) & (other_logit > -torch.inf)
    against = (content > other_content) & (logit < other_logit) | (content < other_content) & (logit > other_logit)
    return counted & against, counted


def _sum_by_head(x: Tensor) -> Tensor:
    """Sum `[1, H, …]` -> `[H]`."""
    return x.double().flatten(2).sum((0, 2))


class _Sums:
    """Sums by measure and layer, `[H]` each."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[int, list[Tensor]]] = {}

    def add(self, layer: int, measures: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, found in measures.items():
            sums = self.sums.setdefault(name, {}).setdefault(layer, [torch.zeros_like(x) for x in found])
            for total, new in zip(sums, found, strict=True):
                total += new

    def ratios(self) -> dict[str, PerHead]:
        return {
            name: [
                [round(a / b, 6) if b else None for a, b in zip(part.tolist(), whole.tolist(), strict=True)]
                for part, whole in layers.values()
            ]
            for name, layers in self.sums.items()
        }
