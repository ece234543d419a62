"""Attention maps of a window, small enough to keep: what a figure needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tra.attention import MECHANISMS, Attention, ThresholdRelativeAttention
from tra.evaluation.diagnosis import exact_products
from tra.evaluation.exact_match import draw_test_set
from tra.model import Decoder
from tra.runs.attention_file import LEVELS, Attended
from tra.runs.folder import RunFolder, write_arrays
from tra.tasks import FlipFlop, Task
from tra.tasks.flipflop import from_tokens
from tra.text import TokenStore, load_tokenizer
from tra.text.task import Stream, Text, check_ids

WINDOW = 256
"""Tokens of a map, and the longest input that is shown whole."""

LAST, MOST = 64, 1024
"""Queries and keys that are shown of a longer input, by default and at most."""

CELLS = 2**19
"""Queries times keys that are looked at together in a head."""

Range = tuple[int, int]
"""From, and up to but without."""


@torch.no_grad()
def attention_maps(model: Decoder, tokens: Tensor) -> npt.NDArray[np.uint8]:
    """Weights of every layer and head over a window `[1, T]` -> `[L, H, T, T]`, a byte each.

    0 is a key that is not seen or was dropped; 1 … 64 stand for 0 … 1, by the square root, so that small weights show.
    Negative weights, which differential attention has, count as 0.
    """
    _check_attention(model)
    model.eval()
    with exact_products():
        found = []
        for layer, x in model.attention_inputs(tokens):
            seen = layer.attention_map(x)
            found.append(_bytes_of(seen.weights, seen.logits > -torch.inf)[0].cpu().numpy())
    return np.stack(found)


def write_maps(run: RunFolder, model: Decoder, stream: Stream, windows: int, device: torch.device) -> None:
    """Maps of some windows, spread over a text, to maps-<text>.npz: `tokens` `[N, T]`, `maps` `[N, L, H, T, T]`."""
    if windows < 1:
        raise ValueError(f"maps are of at least 1 window, got {windows}")
    size = min(WINDOW, len(stream.tokens) - 1)
    starts = np.linspace(0, len(stream.tokens) - size, windows + 2).astype(int)[1:-1]
    tokens = np.stack([stream.tokens[start : start + size] for start in starts]).astype(np.int64)
    maps = [attention_maps(model, torch.from_numpy(row)[None].to(device)) for row in tokens]
    arrays = {"tokens": tokens.astype(np.int32), "starts": starts, "maps": np.stack(maps)}
    write_arrays(run.path / f"maps-{stream.name}.npz", arrays)


class Shown(NamedTuple):
    """A sequence for a run to look at."""

    tokens: Tensor  # [T]
    symbols: list[str]  # [T]
    marked: list[int]  # places of the queries at which an answer is due
    title: str


def task_sequence(task: Task, split: str, seed: int = 0, text: str | None = None) -> Shown:
    """The first test sequence of a split, or of flip-flop one that is written out."""
    if text is not None:
        if not isinstance(task, FlipFlop):
            raise ValueError(f"a sequence can be written out for flipflop alone; this run learnt {task.name}")
        batch, title = from_tokens(task.parse(text)[None]), "as given"
    else:
        task.lengths(split)
        (batch,) = draw_test_set(task, split, 1, seed, 1, torch.device("cpu"))
        title = f"{split}, seed {seed}"
    due = batch.loss_mask[0].nonzero()[:, 0].tolist()
    symbols = [task.vocabulary[token] for token in batch.tokens[0].tolist()]
    end = next((place for place, symbol in enumerate(symbols) if symbol == "<pad>"), len(symbols))
    return Shown(batch.tokens[0, :end], symbols[:end], due, f"{task.name}, {title}")


def text_sequence(
    task: Text, *, store: Path | None = None, prompt: str | None = None, start: int = 0, window: int = WINDOW
) -> Shown:
    """A window of a store, or of the run's validation text; or a text that is written out, as a document."""
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
    return Shown(torch.from_numpy(ids), symbols, [], title)


@torch.no_grad()
def attend(
    model: Decoder,
    shown: Shown,
    *,
    rows: Range | None = None,
    keys: Range | None = None,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
) -> Attended:
    """What queries `rows` make of `keys`, in some layers and heads, all by default.

    Of an input of more than 256 tokens the last 64 queries and keys are shown by default. Rows are taken in pieces, and
    all keys are only ever held for a piece.
    """
    _check_attention(model)
    length = len(shown.tokens)
    rows = rows or ((0, length) if length <= WINDOW else (length - LAST, length))
    keys = keys or ((0, rows[1]) if rows[1] <= WINDOW else rows)
    for name, (first, end) in (("rows", rows), ("keys", keys)):
        if not 0 <= first < end <= length:
            raise ValueError(f"{name} go from 0 up to {length:,}, the sequence's length, got {first:,} to {end:,}")
        if end - first > MOST:
            raise ValueError(f"{name} can be {MOST:,} at most, got {end - first:,}")
    layers = _chosen("layer", layers, model.config.n_layers)
    model.eval()
    places, pieces = torch.arange(*rows), max(1, CELLS // length)
    with exact_products():
        inputs = model.attention_inputs(shown.tokens[None].to(model.embed_tokens.weight.device))
        seen = [
            [_piece(*inputs[layer], part, keys, heads) for part in places.to(inputs[layer][1].device).split(pieces)]
            for layer in layers
        ]
    weights, content, distances, null = (
        np.stack([np.concatenate([part[index] for part in parts], axis=1) for parts in seen]) for index in range(4)
    )
    return Attended(
        symbols=np.array(shown.symbols[slice(*keys)]),
        row_symbols=np.array(shown.symbols[slice(*rows)]),
        rows=places.numpy(),
        columns=np.arange(*keys),
        marked=np.array([place for place in shown.marked if rows[0] <= place < rows[1]], dtype=np.int64),
        layers=np.array(layers),
        heads=np.array(heads or range(weights.shape[1])),
        weights=weights,
        content=content,
        distances=distances,
        null=null,
        mechanism=model.config.mechanism,
        title=shown.title + (f", {rows[0]:,} to {rows[1] - 1:,} of {length:,}" if rows[1] - rows[0] < length else ""),
    )


def _piece(
    layer: Attention, x: Tensor, rows: Tensor, keys: Range, heads: Sequence[int]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16], npt.NDArray[np.uint16], npt.NDArray[np.bool_]]:
    """Weights, content and distances `[H, R, C]` of some rows, and which of them keep nothing `[H, R]`."""
    found = layer.attention_map(x, rows=rows)
    chosen, shown = list(_chosen("head", heads, found.weights.shape[1])), slice(*keys)
    kept = found.logits[0, chosen] > -torch.inf  # [H, R, T]
    key = torch.arange(x.shape[1], device=x.device)
    if isinstance(layer, ThresholdRelativeAttention):
        far = kept.to(torch.int32).flip(-1).cumsum(-1).flip(-1)[..., shown]
    else:
        far = (rows[:, None] - key[shown] + 1).expand_as(kept[..., shown])
    distances = torch.where(kept[..., shown], far.clamp(max=2**16 - 1), 0)
    visible = key[shown] <= rows[:, None]
    content = torch.where(visible, found.content[0, chosen][..., shown], 0.0).clamp(-6e4, 6e4)  # as float16 has it
    return (
        _bytes_of(found.weights[0, chosen][..., shown], kept[..., shown]).cpu().numpy(),
        content.half().cpu().numpy(),
        distances.cpu().numpy().astype(np.uint16),
        (~kept.any(-1)).cpu().numpy(),
    )


def _bytes_of(weights: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, 1 + (LEVELS * weights.clamp(0, 1).sqrt()).round(), 0).to(torch.uint8)


def _chosen(kind: str, wanted: Sequence[int], count: int) -> Sequence[int]:
    for number in wanted:
        if not 0 <= number < count:
            raise ValueError(f"there is no {kind} {number}: {kind}s go from 0 to {count - 1}")
    return wanted or range(count)


def _check_attention(model: Decoder) -> None:
    if MECHANISMS[model.config.mechanism].replaces_mlp:
        raise ValueError(f"{model.config.mechanism} has no attention to map")
