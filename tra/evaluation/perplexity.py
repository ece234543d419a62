"""Measure the perplexity of a text by the window in which a model reads it.

Every token of the text except separators is scored at every window, so that windows can be compared: only the context
of a token changes. Windows lie side by side, as in the paper, or overlap by half. Then each window scores its second
half, so that every token except the first ones has at least half a window before it. Intervals are over documents,
since tokens of one document are not independent.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tra.model import Decoder
from tra.runs import UNREADABLE_ARRAYS, RunFolder, bootstrap_interval, put_row, write_arrays
from tra.text import VOCABULARIES
from tra.text.task import Stream, check_ids
from tra.training.device import autocast, device_name, matmul_precision, resolve_precision
from tra.training.loss import cross_entropy_by_token

WINDOWS = tuple(2**n for n in range(7, 15))
"""Windows measured by default: 128 … 16,384."""

Overlap = Literal["none", "half"]
Losses = npt.NDArray[np.float32]


@dataclass(frozen=True)
class WindowResult:
    """One line of perplexity.jsonl."""

    text: str
    window: int
    overlap: str
    tokens: int
    """Scored tokens: all but separators."""
    documents: int
    loss: float
    """Nats per token."""
    perplexity: float
    low: float | None
    """Lower end of the 95 % interval of `perplexity`, documents resampled; None where there is one document."""
    high: float | None
    word_perplexity: float | None
    byte_perplexity: float | None
    bits_per_byte: float | None
    by_position: list[tuple[int, float | None, int]]
    """(last position in the window, nats per token since the entry before, tokens)."""
    by_document: list[tuple[float, int]]
    """(sum of nats, tokens) of each document."""
    precision: str
    device: str
    seconds: float


class Span(NamedTuple):
    """A window: it reads tokens `start..end-1` and is scored on the targets `scored..end`."""

    start: int
    scored: int
    end: int


def spans(tokens: int, window: int, overlap: Overlap) -> list[Span]:
    """Return windows over a stream that together score every token but the first once."""
    stride = window if overlap == "none" else window // 2
    found: list[Span] = []
    for start in range(0, tokens - 1, stride):
        end = min(start + window, tokens - 1)
        scored = found[-1].end + 1 if found else 1
        if scored <= end:
            found.append(Span(start, scored, end))
    return found


@torch.no_grad()
def token_losses(
    model: Decoder,
    stream: Stream,
    window: int,
    overlap: Overlap,
    *,
    batch_tokens: int,
    device: torch.device,
    precision: str = "auto",
    progress: Callable[[int], None] = lambda _: None,
) -> Losses:
    """Return the nats of every token of the stream, `[N]`, given its window; NaN for separators and the first."""
    model.eval()
    windows = spans(len(stream.tokens), window, overlap)
    losses = np.full(len(stream.tokens), np.nan, dtype=np.float32)
    whole = [span for span in windows if span.end - span.start == window]
    rows = max(1, batch_tokens // window)
    batches = [whole[i : i + rows] for i in range(0, len(whole), rows)]
    batches += [[span] for span in windows if span.end - span.start < window]
    done = 0
    for batch in batches:
        ids = np.stack([stream.tokens[span.start : span.end + 1] for span in batch]).astype(np.int64)
        tokens = torch.from_numpy(ids).to(device)
        with autocast(device, precision):
            hidden = model.hidden(tokens[:, :-1])
        of_batch = cross_entropy_by_token(model, hidden, tokens[:, 1:])
        for span, row in zip(batch, of_batch.cpu().numpy(), strict=True):
            losses[span.scored : span.end + 1] = row[span.scored - span.start - 1 :]
            done += span.end + 1 - span.scored
        progress(done)
    losses[np.asarray(stream.tokens) == stream.separator] = np.nan
    return losses


def evaluate_text(
    model: Decoder,
    stream: Stream,
    windows: Sequence[int],
    overlaps: Sequence[Overlap] = ("none",),
    *,
    batch_tokens: int = 65_536,
    device: torch.device | None = None,
    precision: str = "auto",
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[tuple[WindowResult, Losses]]:
    """Yield the result of each window, with the loss of every token, as soon as it is measured."""
    device = torch.device("cpu") if device is None else device
    check_windows(windows, overlaps, stream)
    known = min(model.config.vocab_size, VOCABULARIES[stream.tokenizer])  # a model's ids are rounded up
    check_ids(np.asarray(stream.tokens), known, stream.name)
    # Unless float32 is asked for, the head is computed in TF32 on a GPU, as in training.
    products = nullcontext() if precision == "float32" else matmul_precision("high")
    with products:
        for overlap, window in itertools.product(overlaps, windows):
            begun = time.monotonic()
            label = f"{stream.name}, {window:,}" + (", half" if overlap == "half" else "")

            def show(done: int, label: str = label) -> None:
                progress(label, done, len(stream.tokens) - 1)

            losses = token_losses(
                model,
                stream,
                window,
                overlap,
                batch_tokens=batch_tokens,
                device=device,
                precision=precision,
                progress=show,
            )
            yield _result(stream, window, overlap, losses, precision, device, begun), losses


def windows_that_fit(stream: Stream) -> tuple[int, ...]:
    """Return the default windows that are shorter than the text."""
    return tuple(window for window in WINDOWS if window < len(stream.tokens))


def check_windows(windows: Sequence[int], overlaps: Sequence[str], stream: Stream) -> None:
    """Raise a ValueError for windows that are longer than the text, or that can't overlap by half."""
    for window in windows:
        if window < 1 or ("half" in overlaps and window % 2):
            raise ValueError(f"a window must be at least 1, and even to overlap by half, got {window}")
        if window >= len(stream.tokens):
            raise ValueError(
                f"a window of {window:,} tokens is longer than {stream.name}, which has {len(stream.tokens) - 1:,}"
            )


def evaluate_run_text(
    run: RunFolder, results: Iterator[tuple[WindowResult, Losses]], keep_losses: bool = False
) -> Iterator[WindowResult]:
    """Write each result to perplexity.jsonl before passing it on; if asked, write losses to losses-<text>.npz too."""
    for result, losses in results:
        put_row(run.perplexity_file, asdict(result), ("text", "window", "overlap", "precision"))
        if keep_losses:
            file = run.path / f"losses-{result.text}.npz"
            arrays = _read_arrays(file)
            arrays[f"{result.window}/{result.overlap}"] = pack_losses(losses)
            write_arrays(file, arrays)
        yield result


def _read_arrays(file: Path) -> dict[str, Any]:
    """Return the arrays of an .npz that is to be written again, none if it doesn't exist. Damage is a ValueError."""
    if not file.is_file():
        return {}
    try:
        with np.load(file) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except UNREADABLE_ARRAYS as error:
        raise ValueError(f"{file} is damaged, so nothing is added to it: {error}") from None


STEPS_PER_ROOT = 56
"""Steps in which the square root of a loss is stored."""


def pack_losses(losses: Losses) -> npt.NDArray[np.uint8]:
    """Return losses as a byte each: the square root in steps of 1/56, up to 20.6 nats, and 255 for NaN.

    At 3 nats a step is 0.06.
    """
    steps = np.clip(np.round(np.sqrt(np.nan_to_num(losses)) * STEPS_PER_ROOT), 0, 254)
    return np.where(np.isnan(losses), 255, steps).astype(np.uint8)


def unpack_losses(packed: npt.NDArray[np.uint8]) -> Losses:
    """Return the losses that `pack_losses` stored."""
    losses = np.square(packed.astype(np.float32) / STEPS_PER_ROOT)
    return np.where(packed == 255, np.float32(np.nan), losses)


def _result(
    stream: Stream, window: int, overlap: Overlap, losses: Losses, precision: str, device: torch.device, begun: float
) -> WindowResult:
    scored = ~np.isnan(losses)
    indices = np.flatnonzero(scored)
    values = losses[indices].astype(np.float64)
    if not len(values):
        raise ValueError(f"{stream.name} has no loss at window {window:,}: the model's output is not a number")
    total = float(values.sum())
    document = np.searchsorted(stream.documents[:, 0], indices, side="right") - 1
    sums = np.bincount(document, values, minlength=len(stream.documents)).astype(np.float64)
    counts = np.bincount(document, minlength=len(stream.documents))
    filled = counts > 0
    ends = bootstrap_interval(sums[filled], counts[filled]) if filled.sum() > 1 else None
    n_bytes, n_words = (None if (sizes < 0).any() else int(sizes.sum()) for sizes in stream.documents[:, 1:].T)
    return WindowResult(
        text=stream.name,
        window=window,
        overlap=overlap,
        tokens=len(values),
        documents=int(filled.sum()),
        loss=total / len(values),
        perplexity=float(np.exp(total / len(values))),
        low=float(np.exp(ends[0])) if ends else None,
        high=float(np.exp(ends[1])) if ends else None,
        word_perplexity=float(np.exp(total / n_words)) if n_words else None,
        byte_perplexity=float(np.exp(total / n_bytes)) if n_bytes else None,
        bits_per_byte=float(total / n_bytes / np.log(2)) if n_bytes else None,
        by_position=_by_position(losses, window, overlap),
        by_document=[(round(float(a), 3), int(b)) for a, b in zip(sums, counts, strict=True)],
        precision=resolve_precision(precision, device),
        device=device_name(device),
        seconds=round(time.monotonic() - begun, 2),
    )


def _by_position(losses: Losses, window: int, overlap: Overlap) -> list[tuple[int, float | None, int]]:
    """Average losses between positions 1, 2, 4, …: a target at position n has n tokens of its window before it."""
    position = np.zeros(len(losses), dtype=np.int64)
    for span in spans(len(losses), window, overlap):
        position[span.scored : span.end + 1] = np.arange(span.scored, span.end + 1) - span.start
    found: list[tuple[int, float | None, int]] = []
    low, high = 0, 1
    while low < window:
        values = losses[(position > low) & (position <= min(high, window)) & ~np.isnan(losses)]
        mean = round(float(values.mean(dtype=np.float64)), 5) if len(values) else None
        found.append((min(high, window), mean, len(values)))
        low, high = high, 2 * high
    return found
