"""Exact match by split and length, with intervals.

The test set of a split is a function of the evaluation's seed alone (on one kind of device), whatever the model and
the batch: every mechanism and every training seed is judged on the same sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tra.config import EvalConfig
from tra.model import Decoder
from tra.runs import RunFolder, put_row, wilson_interval
from tra.tasks import Batch, FlipFlop, Task, generator
from tra.tasks.flipflop import from_tokens
from tra.training.step import autocast, score

MOST_ROWS, MOST_TOKENS = 256, 2**20
"""Test sequences are drawn in pieces of this many at most, so that their number doesn't change what they are."""


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


def chosen_splits(task: Task, config: EvalConfig, splits: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    """Shortest and longest input of the splits asked for; of the config's, or all, by default."""
    splits = tuple(splits) or config.splits or tuple(s for s in task.splits if s != "train")
    return {split: task.lengths(split) for split in splits}


def draw_test_set(task: Task, split: str, examples: int, seed: int, rows: int, device: torch.device) -> Iterator[Batch]:
    """`examples` test sequences in batches of at most `rows`."""
    piece = max(1, min(MOST_ROWS, MOST_TOKENS // task.size(split)))
    for index in range(-(-examples // piece)):
        drawn = task.sample(split, piece, generator(seed, f"test/{split}", index, device), device)
        drawn = Batch(*(x[: examples - index * piece] for x in drawn))
        yield from (Batch(*part) for part in zip(*(x.split(rows) for x in drawn), strict=True))


@torch.no_grad()
def evaluate_batches(
    model: Decoder,
    batches: Iterator[Batch],
    device: torch.device,
    precision: str,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[int, int, int, int]:
    """Sequences right, sequences, tokens right, tokens scored."""
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
    return exact_rows, sequences, correct_tokens, scored_tokens


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
    """Results split by split, as they come.

    Args:
        splits: Those to look at; the config's by default.
        examples: Sequences per split; the config's by default.
        progress: Called with split, sequences done and sequences in all.
    """
    device = torch.device("cpu") if device is None else device
    for split, (shortest, longest) in chosen_splits(task, config, splits).items():
        n = examples if examples is not None else config.examples_of.get(split, config.examples)
        if n < 1:
            raise ValueError(f"examples must be at least 1, got {n}")
        rows = max(1, config.batch_tokens // task.size(split))
        begun = time.monotonic()
        batches = draw_test_set(task, split, n, seed, rows, device)

        def show(done: int, split: str = split, n: int = n) -> None:
            progress(split, done, n)

        counts = evaluate_batches(model, batches, device, precision, show)
        yield _result(split, shortest, longest, counts, seed, precision, device, begun)


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
    batches = (from_tokens(part.to(device)) for part in tokens.split(rows))
    counts = evaluate_batches(model, batches, device, precision)
    return _result(path.name, tokens.shape[1], tokens.shape[1], counts, 0, precision, device, begun)


def evaluate_run(run: RunFolder, results: Iterator[SplitResult]) -> Iterator[SplitResult]:
    """Write each result to eval.jsonl as it comes."""
    for result in results:
        put_row(run.evaluation_file, asdict(result), ("split", "seed", "precision"))
        yield result


def _result(
    split: str,
    shortest: int,
    longest: int,
    counts: tuple[int, int, int, int],
    seed: int,
    precision: str,
    device: torch.device,
    begun: float,
) -> SplitResult:
    exact, sequences, correct, scored = counts
    low, high = wilson_interval(exact, sequences)
    return SplitResult(
        split=split,
        shortest=shortest,
        longest=longest,
        examples=sequences,
        exact=exact / sequences,
        low=low,
        high=high,
        token_accuracy=correct / max(1, scored),
        tokens=scored,
        seed=seed,
        precision="bfloat16" if precision == "auto" and device.type == "cuda" else precision.replace("auto", "float32"),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        seconds=round(time.monotonic() - begun, 2),
    )
