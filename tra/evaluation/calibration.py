"""Measure the attention weight that windows of the newest keys leave out, and choose windows by it.

A window of W keys holds the query's own key and the W - 1 keys before it. TRA's distances are counted from the query
back, so that the keys in the window keep their logits. The output with the window differs from the whole output by the
dropped weight times the difference of two averages of values, which is at most twice the largest norm of a value.

Only queries in the second half of each sequence are measured: each has at least half of the sequence before it. Earlier
queries have few keys, drop nothing, and would make the mean too small. For the same reason windows go up to half the
length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tra.attention import MECHANISMS, Attention, ThresholdRelativeAttention
from tra.config import EvalConfig
from tra.evaluation.exact_match import chosen_splits, draw_test_set
from tra.model import Decoder
from tra.runs import STATISTICS, Calibration, RunFolder, bootstrap_interval, model_identity
from tra.tasks import Task
from tra.text.task import Stream, check_ids
from tra.training.device import device_name, matmul_precision

DEFAULT_LENGTH, DEFAULT_SEQUENCES = 4096, 16
"""Tokens of a sequence of text, if the text is long enough, and sequences of text or of a task."""

SHORTEST_LENGTH = 8
TAIL = 1e-3
"""Share of queries that may drop more than the tolerance, in windows by the statistic `tail`."""

MAX_CELLS = 2**21
"""Largest number of queries times keys times heads that are computed at once."""

Counts = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]


class DroppedWeight(NamedTuple):
    """The weight that windows leave out, summed over the queries of each sequence.

    Arrays are `[sequences, layers, heads, windows]`.
    """

    windows: tuple[int, ...]
    weight: Sums
    beyond: Counts  # number of queries that drop more than the tolerance
    queries: Counts  # [sequences], number of queries

    def mean(self) -> Sums:
        """Return the mean over queries, `[layers, heads, windows]`."""
        return self.weight.sum(0) / self.queries.sum()

    def share_beyond(self) -> Sums:
        """Return the share of queries that drop more than the tolerance, `[layers, heads, windows]`."""
        return np.asarray(self.beyond.sum(0) / self.queries.sum())

    def interval(self, layer: int, head: int, window: int) -> tuple[float, float]:
        """Return the 95 % interval of the mean at one of `windows`, from resampled sequences."""
        return bootstrap_interval(self.weight[:, layer, head, self.windows.index(window)], self.queries)


class Sequences(NamedTuple):
    """The token sequences that a calibration reads."""

    text: str
    source: str
    tokens: list[npt.NDArray[np.int64]]


def check_tolerance(tolerance: float) -> None:
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie above 0 and below 1, got {tolerance}")


def check_windowed(mechanism: str) -> None:
    """Raise a ValueError for a mechanism that is neither TRA nor TRA without a gate."""
    if not issubclass(MECHANISMS[mechanism], ThresholdRelativeAttention):
        raise ValueError(f"{mechanism} has no windows to calibrate: they are measured for TRA")


def candidate_windows(length: int) -> tuple[int, ...]:
    """Return 1, 2, 3, 4, 6, 8, 12, …: powers of two and the numbers between, up to half of `length`."""
    powers = [2**n for n in range((length // 2).bit_length())]
    return tuple(sorted({w for power in powers for w in (power, power * 3 // 2) if w <= length // 2}))


def text_sequences(
    stream: Stream, vocabulary: int, length: int | None = None, count: int = DEFAULT_SEQUENCES, seed: int = 0
) -> Sequences:
    """Draw sequences of a text: the beginnings of long documents, or pieces of running text without overlap.

    Args:
        length: Tokens of each sequence; by default 4,096, or the largest power of two that fits 8 times into the text.
        count: Most sequences to draw; a short text has fewer.
    """
    total = len(stream.tokens)
    if length is None:
        length = min(DEFAULT_LENGTH, 2 ** max(3, int(math.log2(max(8, total / 8)))))
    if length < SHORTEST_LENGTH or count < 2:
        raise ValueError(
            f"a calibration takes at least 2 sequences of at least {SHORTEST_LENGTH} tokens, "
            f"got {count:,} of {length:,}"
        )
    begins = stream.documents[:, 0]
    starts = begins[np.diff(begins, append=total) >= length]
    source = "documents"
    if len(starts) < count:
        starts, source = np.arange(0, total - length + 1, length), "running text"
    if len(starts) < 2:
        raise ValueError(
            f"{stream.name} has {total:,} tokens: a calibration needs at least 2 sequences of {length:,} tokens"
        )
    chosen = np.sort(np.random.default_rng(seed % 2**64).permutation(starts)[:count])
    tokens = [np.asarray(stream.tokens[start : start + length]).astype(np.int64) for start in chosen]
    check_ids(np.stack(tokens), vocabulary, stream.name)
    return Sequences(stream.name, source, tokens)


def task_sequences(
    task: Task, config: EvalConfig, split: str | None = None, count: int = DEFAULT_SEQUENCES, seed: int = 0
) -> Sequences:
    """Return the first test sequences of a split, without padding; by default of the first split that is evaluated."""
    if count < 2:
        raise ValueError(f"a calibration takes at least 2 sequences, got {count:,}")
    split = next(iter(chosen_splits(task, config))) if split is None else split
    padding = task.vocabulary.index("<pad>") if "<pad>" in task.vocabulary else -1
    tokens = []
    for batch in draw_test_set(task, split, count, seed, 1, torch.device("cpu")):
        row = batch.tokens[0].numpy()
        ends = np.flatnonzero(row == padding)
        tokens.append(row[: ends[0]] if len(ends) else row)
    if min(map(len, tokens)) < 2:
        raise ValueError(f"{task.name}'s split {split} has sequences of fewer than 2 tokens")
    return Sequences(task.name, split, tokens)


def measure_dropped_weight(
    model: Decoder,
    sequences: Iterable[npt.NDArray[np.int64]],
    windows: Sequence[int],
    tolerance: float,
    progress: Callable[[int], None] = lambda _: None,
) -> DroppedWeight:
    """Return the weight that each window leaves out at queries of each sequence's second half, in full precision."""
    check_tolerance(tolerance)
    check_windowed(model.config.mechanism)
    model.eval()
    weight, beyond, queries = [], [], []
    with matmul_precision("highest"):
        for done, tokens in enumerate(sequences, start=1):
            ids = torch.from_numpy(tokens)[None].to(model.embed_tokens.weight.device)
            rows = torch.arange(len(tokens) // 2, len(tokens), device=ids.device)
            sums = [_sums_of_layer(*pair, rows, windows, tolerance) for pair in model.attention_inputs(ids)]
            weight.append(np.stack([total.cpu().numpy() for total, _ in sums]))
            beyond.append(np.stack([count.cpu().numpy() for _, count in sums]))
            queries.append(len(rows))
            progress(done)
    found = DroppedWeight(tuple(windows), np.stack(weight), np.stack(beyond), np.array(queries))
    if not np.isfinite(found.weight).all():
        raise ValueError("the model's attention is not a number: there is nothing to calibrate")
    return found


def _sums_of_layer(
    layer: Attention, x: Tensor, rows: Tensor, windows: Sequence[int], tolerance: float
) -> tuple[Tensor, Tensor]:
    """Return the dropped weight summed over queries `rows`, and how many of them exceed the tolerance: `[H, W]`."""
    total = torch.zeros(layer.n_heads, len(windows), dtype=torch.float64, device=x.device)
    count = torch.zeros_like(total, dtype=torch.int64)
    for dropped in dropped_weights(layer, x, rows, windows):
        total += dropped.sum(1, dtype=torch.float64)
        count += (~(dropped <= tolerance)).sum(1)
    return total, count


@torch.no_grad()
def dropped_weights(layer: Attention, x: Tensor, rows: Tensor, windows: Sequence[int]) -> Iterator[Tensor]:
    """Yield the weight that each window leaves out, for blocks of the queries `rows` `[R]`: `[H, block, W]`.

    Args:
        x: The layer's input, `[1, T, d_model]`.
    """
    sizes = torch.tensor(windows, device=x.device)
    inputs = layer.prepare_inputs(x)
    for block in rows.split(max(1, MAX_CELLS // (layer.n_heads * x.shape[1]))):
        weights = layer.weigh(layer.logits(inputs, block))[0]  # [H, block, T]
        up_to = weights.cumsum(-1)  # from the oldest key, so that small sums stay exact
        newest_dropped = block[:, None] - sizes  # [block, W]; negative where nothing is dropped
        found = up_to.gather(-1, newest_dropped.clamp(min=0).expand(len(weights), -1, -1))
        yield torch.where(newest_dropped >= 0, found, 0.0)


def calibrate(
    run: RunFolder,
    model: Decoder,
    sequences: Sequences,
    tolerance: float,
    *,
    statistic: str = STATISTICS[0],
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Calibration:
    """Return the smallest windows of a run's model that stay within the tolerance on the sequences."""
    begun, length = time.monotonic(), max(map(len, sequences.tokens))

    def show(done: int) -> None:
        progress(sequences.text, done, len(sequences.tokens))

    windows = candidate_windows(length)
    found = measure_dropped_weight(model, sequences.tokens, windows, tolerance, show)
    chosen = {
        "mean": _smallest(found.mean() < tolerance, windows),
        "tail": _smallest(found.share_beyond() <= TAIL, windows),
    }
    taken = chosen[statistic]
    return Calibration(
        **model_identity(run),
        tolerance=tolerance,
        statistic=statistic,
        text=sequences.text,
        source=sequences.source,
        length=length,
        sequences=len(sequences.tokens),
        queries=int(found.queries.sum()),
        seed=seed,
        device=device_name(model.embed_tokens.weight.device),
        seconds=round(time.monotonic() - begun, 2),
        windows=_filled(taken, length),
        mean_windows=_filled(chosen["mean"], length),
        tail_windows=_filled(chosen["tail"], length),
        open_heads=np.argwhere(taken == 0).tolist(),
        **_errors(found, taken),
    )


def _smallest(is_enough: npt.NDArray[np.bool_], windows: Sequence[int]) -> Counts:
    """Return the smallest window that is enough, 0 if none is: `[layers, heads, windows]` -> `[layers, heads]`."""
    smallest = np.array(windows, dtype=np.int64)[is_enough.argmax(-1)]
    return np.where(is_enough.any(-1), smallest, 0)


def _filled(windows: Counts, length: int) -> list[list[int]]:
    filled: list[list[int]] = np.where(windows == 0, length, windows).tolist()
    return filled


def _errors(found: DroppedWeight, taken: Counts) -> dict[str, Any]:
    """Return the fields of a calibration that say what its windows drop; None for open heads."""
    mean, share = found.mean(), found.share_beyond()
    dropped: list[list[list[float] | None]] = []
    beyond: list[list[float | None]] = []
    for layer, heads in enumerate(taken.tolist()):
        dropped.append([None] * len(heads))
        beyond.append([None] * len(heads))
        for head, window in enumerate(heads):
            if window:
                index = found.windows.index(window)
                ends = (mean[layer, head, index], *found.interval(layer, head, window))
                dropped[-1][head] = [float(f"{x:.4g}") for x in ends]
                beyond[-1][head] = float(f"{share[layer, head, index]:.4g}")
    return {"dropped": dropped, "beyond": beyond}
