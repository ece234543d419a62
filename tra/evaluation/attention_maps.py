"""Attention maps of a window, small enough to store: what a figure needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tra.attention import MECHANISMS, Attention, ThresholdRelativeAttention
from tra.evaluation.exact_match import draw_test_set
from tra.model import Decoder
from tra.runs import LEVELS, AttentionMaps, RunFolder, variant_of, write_arrays
from tra.tasks import FlipFlop, Task
from tra.text import TokenStore, load_tokenizer
from tra.text.task import Stream, Text, check_ids
from tra.training.device import matmul_precision

WINDOW = 256
"""Tokens of a map, and the longest input that is shown whole."""

DEFAULT_SHOWN, MAX_SHOWN = 64, 1024
"""Queries and keys shown of a longer input, by default and at most."""

MAX_CELLS = 2**19
"""Queries times keys computed at once in a head."""

Range = tuple[int, int]
"""First index, and the index after the last."""


@torch.no_grad()
def attention_maps(model: Decoder, tokens: Tensor) -> npt.NDArray[np.uint8]:
    """Return the weights of every layer and head over a window `[1, T]` -> `[L, H, T, T]`, a byte each.

    0 is a key that is not visible or was dropped; 1 … 64 stand for the square root of the weight, 0 … 1, so that small
    weights show. Negative weights, which differential attention has, count as 0.
    """
    _check_attention(model)
    model.eval()
    with matmul_precision("highest"):
        maps = []
        for layer, x in model.attention_inputs(tokens):
            found = layer.attention_map(x)
            maps.append(_pack_weights(found.weights, found.logits > -torch.inf)[0].cpu().numpy())
    return np.stack(maps)


def write_maps(run: RunFolder, model: Decoder, stream: Stream, windows: int, device: torch.device) -> None:
    """Write maps of windows spread over a text to maps-<text>.npz: `tokens` `[N, T]`, `maps` `[N, L, H, T, T]`."""
    if windows < 1:
        raise ValueError(f"maps are of at least 1 window, got {windows}")
    size = min(WINDOW, len(stream.tokens) - 1)
    starts = np.linspace(0, len(stream.tokens) - size, windows + 2).astype(int)[1:-1]
    tokens = np.stack([stream.tokens[start : start + size] for start in starts]).astype(np.int64)
    maps = [attention_maps(model, torch.from_numpy(row)[None].to(device)) for row in tokens]
    arrays = {"tokens": tokens.astype(np.int32), "starts": starts, "maps": np.stack(maps)}
    write_arrays(run.path / f"maps-{stream.name}.npz", arrays)


class InputSequence(NamedTuple):
    """A sequence whose attention is shown."""

    tokens: Tensor  # [T]
    symbols: list[str]  # [T]
    marked: list[int]  # positions of the queries at which an answer is due
    title: str


def task_sequence(task: Task, split: str, seed: int = 0, text: str | None = None) -> InputSequence:
    """Return the first test sequence of a split, or a flip-flop sequence given as text."""
    if text is not None:
        if not isinstance(task, FlipFlop):
            raise ValueError(f"a sequence can be written out for flipflop alone; this run learnt {task.name}")
        batch, title = task.batch_of(task.parse(text)[None]), "as given"
    else:
        task.lengths(split)
        (batch,) = draw_test_set(task, split, 1, seed, 1, torch.device("cpu"))
        title = f"{split}, seed {seed}"
    due = batch.loss_mask[0].nonzero()[:, 0].tolist()
    symbols = [task.vocabulary[token] for token in batch.tokens[0].tolist()]
    end = symbols.index("<pad>") if "<pad>" in symbols else len(symbols)
    return InputSequence(batch.tokens[0, :end], symbols[:end], due, f"{task.name}, {title}")


def text_sequence(
    task: Text, *, store: Path | None = None, prompt: str | None = None, start: int = 0, window: int = WINDOW
) -> InputSequence:
    """Return a window of a store, or of the run's validation text; or a given text as a document."""
    tokenizer = load_tokenizer(task.tokenizer)
    if prompt is not None:
        if not prompt:
            raise ValueError("a prompt has at least one character")
        stream = Stream.of_text("prompt", prompt, tokenizer)
        start, window, title = 0, len(stream.tokens), "text, as given"
    else:
        stream = task.stream("valid") if store is None else Stream.of_store(TokenStore.open(store))
        title = f"{stream.name} from {start:,}"
    if stream.tokenizer != task.tokenizer:
        raise ValueError(f"{stream.name} has the tokenizer {stream.tokenizer!r}, the run {task.tokenizer!r}")
    if window < 1 or not 0 <= start <= len(stream.tokens) - window:
        raise ValueError(
            f"{stream.name} has {len(stream.tokens):,} tokens: a window of {window:,} can't start at {start:,}"
        )
    ids = np.asarray(stream.tokens[start : start + window]).astype(np.int64)
    check_ids(ids, tokenizer.vocab_size, stream.name)
    symbols = [
        "<sep>" if token == tokenizer.separator else tokenizer.token_bytes[token].decode(errors="replace")
        for token in ids.tolist()
    ]
    return InputSequence(torch.from_numpy(ids), symbols, [], title)


@torch.no_grad()
def attend(
    model: Decoder,
    sequence: InputSequence,
    *,
    rows: Range | None = None,
    keys: Range | None = None,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
) -> AttentionMaps:
    """Return the attention of queries `rows` over `keys`, in the given layers and heads, all by default.

    By default, an input of more than 256 tokens shows its last 64 queries and keys. Queries are computed in groups, so
    that the map of all queries over all keys is never held at once.
    """
    _check_attention(model)
    length = len(sequence.tokens)
    rows, keys = _shown_ranges(length, rows, keys)
    layers = _check_indices("layer", layers, model.config.n_layers)
    model.eval()
    indices = torch.arange(*rows)
    with matmul_precision("highest"):
        inputs = model.attention_inputs(sequence.tokens[None].to(model.embed_tokens.weight.device))
        groups = indices.to(inputs[0][1].device).split(max(1, MAX_CELLS // length))
        maps = [[_map_of_rows(*inputs[layer], group, keys, heads) for group in groups] for layer in layers]
    weights, content, distances, uncounted, null = (
        np.stack([np.concatenate([part[index] for part in parts], axis=1) for parts in maps]) for index in range(5)
    )
    title = sequence.title
    if rows[1] - rows[0] < length:
        title += f", {rows[0]:,} to {rows[1] - 1:,} of {length:,}"
    return AttentionMaps(
        symbols=np.array(sequence.symbols[slice(*keys)]),
        row_symbols=np.array(sequence.symbols[slice(*rows)]),
        rows=indices.numpy(),
        columns=np.arange(*keys),
        marked=np.array([position for position in sequence.marked if rows[0] <= position < rows[1]], dtype=np.int64),
        layers=np.array(layers),
        heads=np.array(heads or range(weights.shape[1])),
        weights=weights,
        content=content,
        distances=distances,
        uncounted=uncounted,
        null=null,
        mechanism=variant_of(asdict(model.config)),
        title=title,
    )


def _shown_ranges(length: int, rows: Range | None, keys: Range | None) -> tuple[Range, Range]:
    """Return the queries and keys to show, the defaults filled in."""
    rows = rows or ((0, length) if length <= WINDOW else (length - DEFAULT_SHOWN, length))
    keys = keys or ((0, rows[1]) if rows[1] <= WINDOW else rows)
    for name, (first, end) in (("rows", rows), ("keys", keys)):
        if not 0 <= first < end <= length:
            raise ValueError(f"{name} go from 0 up to {length:,}, the sequence's length, got {first:,} to {end:,}")
        if end - first > MAX_SHOWN:
            raise ValueError(f"{name} can be {MAX_SHOWN:,} at most, got {end - first:,}")
    return rows, keys


def _map_of_rows(
    layer: Attention, x: Tensor, rows: Tensor, keys: Range, heads: Sequence[int]
) -> tuple[npt.NDArray[Any], ...]:
    """Return weights, content, distances and uncounted keys of some queries, `[H, R, C]`, and null rows, `[H, R]`."""
    found = layer.attention_map(x, rows=rows)
    chosen, shown = list(_check_indices("head", heads, found.weights.shape[1])), slice(*keys)
    kept = found.logits[0, chosen] > -torch.inf  # [H, R, T]
    key = torch.arange(x.shape[1], device=x.device)[shown]
    uncounted = torch.zeros_like(kept)
    if isinstance(layer, ThresholdRelativeAttention):
        counted = layer.counted_keys(x, found.logits, rows)[0, chosen]
        uncounted = kept & ~counted
        distances = (counted.to(torch.int32).flip(-1).cumsum(-1).flip(-1) + uncounted)[..., shown]
    else:
        distances = (rows[:, None] - key + 1).expand_as(kept[..., shown])
    distances = torch.where(kept[..., shown], distances.clamp(max=2**16 - 1), 0)
    content = torch.where(key <= rows[:, None], found.content[0, chosen][..., shown], 0.0)
    return (
        _pack_weights(found.weights[0, chosen][..., shown], kept[..., shown]).cpu().numpy(),
        content.clamp(-6e4, 6e4).half().cpu().numpy(),  # within the range of float16
        distances.cpu().numpy().astype(np.uint16),
        uncounted[..., shown].cpu().numpy(),
        (~kept.any(-1)).cpu().numpy(),
    )


def _pack_weights(weights: Tensor, kept: Tensor) -> Tensor:
    """Return the root of each weight as 1 … 64, and 0 for a key that is not kept."""
    return torch.where(kept, 1 + (LEVELS * weights.clamp(0, 1).sqrt()).round(), 0).to(torch.uint8)


def _check_indices(kind: str, indices: Sequence[int], count: int) -> Sequence[int]:
    """Return the indices, all by default."""
    for index in indices:
        if not 0 <= index < count:
            raise ValueError(f"there is no {kind} {index}: {kind}s go from 0 to {count - 1}")
    return indices or range(count)


def _check_attention(model: Decoder) -> None:
    if MECHANISMS[model.config.mechanism].replaces_mlp:
        raise ValueError(f"{model.config.mechanism} has no attention to map")
