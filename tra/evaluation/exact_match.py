"""Exact match by split and length, with intervals.

The test set of a split depends on the evaluation's seed alone (on one kind of device), not on the model or the batch:
every mechanism and every training seed is judged on the same sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tra.config import EvalConfig
from tra.model import Decoder
from tra.runs import RunFolder, put_row, wilson_interval
from tra.tasks import Batch, FlipFlop, Lengths, Task, generator
from tra.training.device import autocast, device_name, resolve_precision
from tra.training.loss import score

MAX_DRAWN_ROWS, MAX_DRAWN_TOKENS = 256, 2**20
"""Test sequences and tokens drawn at once. Part of what a seed means: other numbers give other sequences."""


class Counts(NamedTuple):
    """Counts of right answers in a split."""

    exact: int
    """Sequences in which every scored token is right."""
    sequences: int
    correct: int
    """Right tokens, of those that are scored."""
    scored: int


@dataclass(frozen=True)
class SplitResult:
    """One line of eval.jsonl."""

    split: str
    shortest: int
    """Shortest input of the split."""
    longest: int
    examples: int
    exact: float
    """Fraction of sequences in which every scored token is right."""
    low: float
    """Lower end of the 95 % Wilson interval of `exact`."""
    high: float
    token_accuracy: float
    tokens: int
    """Scored tokens."""
    seed: int
    precision: str
    device: str
    seconds: float


def chosen_splits(task: Task, config: EvalConfig, splits: Sequence[str] = ()) -> dict[str, Lengths]:
    """Return the input lengths of the splits asked for; by default of the config's, or of all but "train"."""
    splits = tuple(splits) or config.splits or tuple(s for s in task.splits if s != "train")
    return {split: task.lengths(split) for split in splits}


def draw_test_set(task: Task, split: str, examples: int, seed: int, rows: int, device: torch.device) -> Iterator[Batch]:
    """Yield `examples` test sequences in batches of at most `rows`."""
    at_once = max(1, min(MAX_DRAWN_ROWS, MAX_DRAWN_TOKENS // task.size(split)))
    for index in range(-(-examples // at_once)):
        drawn = task.sample(split, at_once, generator(seed, f"test/{split}", index, device), device)
        drawn = Batch(*(x[: examples - index * at_once] for x in drawn))
        yield from (Batch(*part) for part in zip(*(x.split(rows) for x in drawn), strict=True))


@torch.no_grad()
def evaluate_batches(
    model: Decoder,
    batches: Iterator[Batch],
    device: torch.device,
    precision: str,
    progress: Callable[[int], None] = lambda _: None,
) -> Counts:
    """Run the model over batches and count what it gets right."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.int64, device=device)
    sequences = 0
    for batch in batches:
        with autocast(device, precision):
            logits = model(batch.tokens)
        correct, scored, exact = score(logits.argmax(-1) == batch.targets, batch.loss_mask)
        sums += torch.stack([exact.sum(), correct, scored])
        sequences += len(batch.tokens)
        progress(sequences)
    exact_rows, correct_tokens, scored_tokens = sums.tolist()
    return Counts(exact_rows, sequences, correct_tokens, scored_tokens)


def evaluate_task(
    model: Decoder,
    task: Task,
    config: EvalConfig,
    *,
    splits: Sequence[str] = (),
    examples: int | None = None,
    seed: int = 0,
    precision: str = "auto",
    device: torch.device | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[SplitResult]:
    """Yield the result of each split as soon as it is measured.

    Args:
        splits: Splits to measure; the config's by default.
        examples: Sequences per split; the config's by default.
        progress: Called with split, sequences done and sequences in all.
    """
    device = torch.device("cpu") if device is None else device
    for split, lengths in chosen_splits(task, config, splits).items():
        n = examples if examples is not None else config.examples_of.get(split, config.examples)
        if n < 1:
            raise ValueError(f"examples must be at least 1, got {n}")
        rows = max(1, config.batch_tokens // task.size(split))
        begun = time.monotonic()
        batches = draw_test_set(task, split, n, seed, rows, device)

        def show(done: int, split: str = split, n: int = n) -> None:
            progress(split, done, n)

        counts = evaluate_batches(model, batches, device, precision, show)
        yield _result(split, lengths, counts, seed, precision, device, begun)


def evaluate_rows(
    model: Decoder, task: Task, path: Path, config: EvalConfig, *, precision: str = "auto", device: torch.device
) -> SplitResult:
    """Score the text rows of a file (`w1i0r1…`, as on the hub) instead of sampled sequences."""
    if not isinstance(task, FlipFlop):
        raise ValueError(f"rows from a file are flip-flop's, but this run learnt {task.name}")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    tokens = task.read_rows(path)
    rows = max(1, config.batch_tokens // tokens.shape[1])
    begun = time.monotonic()
    batches = (task.batch_of(part.to(device)) for part in tokens.split(rows))
    counts = evaluate_batches(model, batches, device, precision)
    lengths = Lengths(tokens.shape[1], tokens.shape[1])
    return _result(path.name, lengths, counts, 0, precision, device, begun)


def evaluate_run(run: RunFolder, results: Iterator[SplitResult]) -> Iterator[SplitResult]:
    """Write each result to eval.jsonl before passing it on."""
    for result in results:
        put_row(run.evaluation_file, asdict(result), ("split", "seed", "precision"))
        yield result


def _result(
    split: str, lengths: Lengths, counts: Counts, seed: int, precision: str, device: torch.device, begun: float
) -> SplitResult:
    low, high = wilson_interval(counts.exact, counts.sequences)
    return SplitResult(
        split=split,
        shortest=lengths.shortest,
        longest=lengths.longest,
        examples=counts.sequences,
        exact=counts.exact / counts.sequences,
        low=low,
        high=high,
        token_accuracy=counts.correct / max(1, counts.scored),
        tokens=counts.scored,
        seed=seed,
        precision=resolve_precision(precision, device),
        device=device_name(device),
        seconds=round(time.monotonic() - begun, 2),
    )
