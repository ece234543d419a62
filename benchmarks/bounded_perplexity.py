"""Measure the perplexity of long running text against the size of the cache: STORE RUN...

TRA reads with a bounded cache, in chunks like a prompt, and once more with the windows of tra calibrate if the run has
them. RoPE and FoT read through a sliding window, with and without the first tokens of the text. Only the second half of
each text is scored, so that every scored token has at least half of the text before it. The largest window is half of
the text. Each size is compared with the model that sees the whole text, paired by document.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks import command
from benchmarks.windowed_attention import WINDOWED, sliding_window
from tra.attention import MECHANISMS, BoundedCache, ThresholdRelativeAttention
from tra.model import Decoder
from tra.report.names import name_of
from tra.report.style import length_ticks, line_styles, panels
from tra.runs import RunFolder, bootstrap_interval, environment, perplexity_ratio, read_windows, variant_of
from tra.text import VOCABULARIES, TokenStore
from tra.text.task import Stream, Text, check_ids
from tra.training.device import autocast, matmul_precision, resolve_precision
from tra.training.loss import cross_entropy_by_token

LENGTHS = (16_384, 65_536)
SHARES = (2, 4, 8, 16, 32, 64)
"""Sizes of the cache, as divisors of the text's length: a half to a 64th."""

SINKS = 4
"""First tokens of the text that stay in the cache, as in StreamingLLM."""

TEXTS = 4
"""Texts of each length, spread over the store."""

CHUNK = 2048
"""Tokens that TRA reads at a time. The cache has room for them besides the window, but queries see only the window."""


class Reading(NamedTuple):
    """A way to read a text: which keys a query sees."""

    method: str  # whole, bounded cache, calibrated cache, window, window and sinks
    window: int | None = None  # the largest, if they differ by head
    sinks: int = 0
    windows: tuple[tuple[int, ...], ...] = ()  # by layer and head, if they differ


def readings(
    mechanism: str, length: int, shares: Sequence[int], calibrated: Sequence[Sequence[int]] = ()
) -> Iterator[Reading]:
    """Yield the ways in which a mechanism reads a text of `length` tokens, the way that sees all of it first.

    Args:
        calibrated: Windows by layer and head, if they have been calibrated.
    """
    yield Reading("whole")
    if calibrated:
        yield Reading("calibrated cache", max(map(max, calibrated)), windows=tuple(map(tuple, calibrated)))
    for share in shares:
        window = length // share
        if issubclass(MECHANISMS[mechanism], ThresholdRelativeAttention):
            yield Reading("bounded cache", window)
            continue
        yield Reading("window", window)
        if window > SINKS:
            yield Reading("window and sinks", window, SINKS)


@torch.no_grad()
def token_losses(model: Decoder, ids: Tensor, reading: Reading, precision: str) -> Tensor:
    """Return the loss in nats of tokens 1 … T - 1 of a text `[T]`."""
    tokens = ids[None]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with autocast(ids.device, precision):
        if reading.method in ("bounded cache", "calibrated cache"):
            assert reading.window is not None
            cache = BoundedCache(model.config.n_layers, reading.windows or reading.window, chunk=CHUNK)
            pieces = inputs.split(CHUNK, dim=1)
            hidden = torch.cat([model.hidden(piece, None, cache) for piece in pieces], dim=1)
        else:
            with nullcontext() if reading.window is None else sliding_window(model, reading.window, reading.sinks):
                hidden = model.hidden(inputs)
    return cross_entropy_by_token(model, hidden, targets)[0]


def text_starts(stream: Stream, length: int, count: int) -> list[int]:
    """Return where up to `count` texts of `length` tokens begin, spread evenly and without overlap."""
    fitting = len(stream.tokens) // length
    if not fitting:
        raise ValueError(f"{stream.name} has {len(stream.tokens):,} tokens: too few for a text of {length:,}")
    starts = np.linspace(0, len(stream.tokens) - length, min(count, fitting)).astype(int)
    found: list[int] = starts.tolist()
    return found


def by_document(losses: npt.NDArray[np.float32], stream: Stream, first: int) -> npt.NDArray[np.float64]:
    """Return (sum of nats, tokens) of each document of a text, `[documents, 2]`, for tokens from `first` on."""
    tokens = np.arange(first, first + len(losses))
    scored = np.asarray(stream.tokens[first : first + len(losses)]) != stream.separator
    document = np.searchsorted(stream.documents[:, 0], tokens[scored], side="right") - 1
    _, number = np.unique(document, return_inverse=True)
    sums = np.bincount(number, losses[scored].astype(np.float64))
    return np.stack([sums, np.bincount(number)], axis=1)


def measure(
    model: Decoder,
    stream: Stream,
    length: int,
    reading: Reading,
    texts: int,
    device: torch.device,
    precision: str,
) -> npt.NDArray[np.float64]:
    """Return (sum of nats, tokens) of each document, or part of one, in the second halves of the texts."""
    found = []
    for start in text_starts(stream, length, texts):
        ids = np.asarray(stream.tokens[start : start + length]).astype(np.int64)
        losses = token_losses(model, torch.from_numpy(ids).to(device), reading, precision)
        half = length // 2
        found.append(by_document(losses[half - 1 :].float().cpu().numpy(), stream, start + half))
    return np.concatenate(found)


def bench_bounded_perplexity(
    runs: Sequence[RunFolder],
    stream: Stream,
    device: torch.device,
    *,
    lengths: Sequence[int] = LENGTHS,
    shares: Sequence[int] = SHARES,
    texts: int = TEXTS,
    precision: str = "auto",
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Return a row for each run, length and way of reading."""
    rows = []
    for run, length in itertools.product(runs, lengths):
        config = run.config()
        variant, mechanism = variant_of(config.to_dict()["model"]), config.model.mechanism
        _check(run, stream)
        model, whole = run.load_model(device), None
        for reading in readings(mechanism, length, shares, _calibrated(run)):
            progress(f"{run.path.name}, {length:,} tokens, {reading.method} {reading.window or ''}".rstrip())
            begun = time.monotonic()
            with matmul_precision("highest") if precision == "float32" else matmul_precision("high"):
                found = measure(model, stream, length, reading, texts, device, precision)
            whole = found if whole is None else whole
            total, tokens = found.sum(0)
            row: dict[str, Any] = {"run": run.path.name, "variant": variant, "length": length} | reading._asdict()
            row |= {"perplexity": round(math.exp(total / tokens), 5), "tokens": int(tokens), "documents": len(found)}
            if len(found) > 1:
                row["95 %"] = [round(math.exp(end), 5) for end in bootstrap_interval(found[:, 0], found[:, 1])]
                times = [round(ratio, 7) for ratio in perplexity_ratio(found, whole)]
                row |= {"times whole": times[0], "times whole, 95 %": times[1:]}
            rows.append(row | {"seconds": round(time.monotonic() - begun, 1)})
    return rows


def _calibrated(run: RunFolder) -> list[list[int]]:
    """Return the windows of a run by layer and head; an empty list if the run hasn't been calibrated."""
    if not run.windows_file.is_file():
        return []
    return read_windows(run.windows_file, run).windows


def _check(run: RunFolder, stream: Stream) -> None:
    """Raise a ValueError for a run of a task, another tokenizer, or a mechanism without windows."""
    config = run.config()
    task = config.task.build()
    if not isinstance(task, Text):
        raise ValueError(f"{run.path} learnt {task.name}: perplexity is of language models")
    if task.tokenizer != stream.tokenizer:
        raise ValueError(f"{stream.name} has the tokenizer {stream.tokenizer!r}, the run {task.tokenizer!r}")
    if not issubclass(MECHANISMS[config.model.mechanism], (ThresholdRelativeAttention, *WINDOWED)):
        raise ValueError(f"{config.model.mechanism} has neither a bounded cache nor a sliding window here")
    check_ids(np.asarray(stream.tokens), VOCABULARIES[stream.tokenizer], stream.name)


def write_figure(rows: Sequence[dict[str, Any]], out: Path) -> Path:
    """Draw perplexity against the size of the cache, a panel for each length."""
    lengths = sorted({row["length"] for row in rows})
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    styles = line_styles(variants)
    with panels(out, 1, len(lengths), (4.6 * len(lengths), 3.8), tight=True, sharey=True) as axes:
        for axis, length in zip(axes[0], lengths, strict=True):
            for variant in variants:
                found = [row for row in rows if (row["variant"], row["length"]) == (variant, length)]
                for row in found:
                    if row["method"] == "calibrated cache":
                        # in older logs all heads of a layer have one window
                        keys = mean(layer if isinstance(layer, int) else mean(layer) for layer in row["windows"])
                        style = styles[variant] | {"label": f"{name_of(variant)}, {row['method']}", "markersize": 11}
                        axis.plot([keys], [row["perplexity"]], **style | {"marker": "*", "linestyle": ""})
                for method in dict.fromkeys(row["method"] for row in found):
                    if method in ("whole", "calibrated cache"):
                        continue
                    points = sorted((row["window"], row["perplexity"]) for row in found if row["method"] == method)
                    points += [(length, row["perplexity"]) for row in found if row["method"] == "whole"]
                    style = styles[variant] | {"label": f"{name_of(variant)}, {method}"}
                    if method == "window and sinks":
                        style |= {"linestyle": "-", "linewidth": 0.7, "markersize": 6, "markerfacecolor": "none"}
                    axis.plot(*zip(*points, strict=True), **style)
            sizes = {length, *(row["window"] for row in rows if row["length"] == length and not row["windows"])}
            length_ticks(axis, sorted(sizes - {None}))
            axis.set(yscale="log", xlabel="window of a head, mean over heads", title=f"text of {length:,} tokens")
        axes[0][0].set_ylabel("perplexity, second half")
        axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("bounded_perplexity", __doc__)
    parser.add_argument("store", type=Path, metavar="STORE")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs of TRA, RoPE and FoT")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens of a text")
    parser.add_argument("--texts", type=int, default=TEXTS, help="texts of each length")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--out", type=Path, help="write FILE.json and the figure FILE.png beside it")
    options = parser.parse_args(arguments)
    if options.texts < 1 or min(options.lengths) < 2 * max(SHARES):
        raise ValueError(f"texts have at least {2 * max(SHARES)} tokens, and there is at least one of each length")
    device, runs = command.pick_device(options.device), [RunFolder.open(name) for name in options.runs]
    stream = Stream.of_store(TokenStore.open(options.store))
    rows = bench_bounded_perplexity(
        runs,
        stream,
        device,
        lengths=options.lengths,
        shares=SHARES,
        texts=options.texts,
        precision=options.precision,
        progress=command.progress,
    )
    configs = {run.path.name: {"config": run.config().to_dict(), "trained": run.sessions()} for run in runs}
    facts = {"text": stream.name, "precision": resolve_precision(options.precision, device), "runs": configs}
    result = {"environment": environment(device), **facts, "rows": rows}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
        write_figure(rows, options.out.with_suffix(".png"))
    command.show(result, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
