"""Continue prompts: read them into a cache, then decode step by step, on a GPU as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention import BoundedCache, Cache, StaticCache, ThresholdRelativeAttention
from tra.attention.shared.cache import PackedRows
from tra.attention.shared.inputs import check_masks
from tra.generation.sampling import GREEDY, TINY, Sampling
from tra.ops.choice import auto_takes_triton

if TYPE_CHECKING:
    from tra.model import Decoder

STOP_CHECK_INTERVAL = 16
"""Tokens between two checks of whether all rows on a GPU are finished, since each check waits for the device."""
WARM_UP_STEPS = 2
"""Steps before a step is captured as a graph. Their tokens belong to the text."""
MIN_TOKENS_FOR_GRAPH = 16
"""Number of new tokens below which capturing a step costs more than it saves."""


def collect(
    columns: Iterator[Tensor], stop_tokens: Sequence[int] = (), stream: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Join columns `[B]` as `[B, N]`, up to the one in which all rows are finished; `stream` is called with each."""
    new: list[Tensor] = []
    stops: Tensor | None = None
    for column in columns:
        new.append(column)
        if stream is not None:
            stream(column)
        if not stop_tokens:
            continue
        stops = _as_tensor(stop_tokens, column.device) if stops is None else stops
        # A finished row repeats its stop token, so the last column is enough.
        check = len(new) % _stop_check_interval(column, stream is not None) == 0
        if check and stops is not None and bool(_is_one_of(column, stops).all()):
            break
    text = torch.stack(new, dim=1)
    if stops is None:
        return text
    unfinished = int((~_is_one_of(text, stops).all(0)).sum())
    return text[:, : unfinished + 1]


def continuation(
    model: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    key_mask: Tensor | None = None,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
    stop_tokens: Sequence[int] = (),
    vocabulary: int | None = None,
    capacity: int | Literal["static"] | None = None,
    cache: Cache | PackedRows | None = None,
    prefill_chunk: int | None = None,
    graph: bool | None = None,
) -> Iterator[Tensor]:
    """Yield the new tokens of prompts `[B, T]`, one column `[B]` after another, as they are generated.

    The arguments are those of `Decoder.generate`, and are checked before the first column is asked for.
    """
    symbols = model.config.vocab_size if vocabulary is None else vocabulary
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not 1 <= symbols <= model.config.vocab_size:
        raise ValueError(f"vocabulary must lie in 1..{model.config.vocab_size}, the model's, got {symbols}")
    for stop in stop_tokens:
        if not 0 <= stop < symbols:
            raise ValueError(f"stop tokens must lie in 0..{symbols - 1}, got {stop}")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
    if generator is not None and generator.device.type != tokens.device.type:
        raise ValueError(f"generator must be on {tokens.device.type}, as tokens are; got one on {generator.device}")
    key_mask = _checked_mask(tokens, key_mask)
    needed = tokens.shape[1] + max_new_tokens
    if isinstance(capacity, str) and capacity != "static":
        raise ValueError(f"capacity must be a number of tokens or 'static', got {capacity!r}")
    if isinstance(capacity, int) and capacity < needed:
        raise ValueError(
            f"a static cache of {capacity:,} tokens can't hold a prompt of {tokens.shape[1]:,} and {max_new_tokens:,} "
            "new tokens"
        )
    if cache is None:
        cache = model.new_cache(needed if isinstance(capacity, str) else capacity)
    else:
        _check_cache(model, cache, needed, capacity)
    if isinstance(cache, BoundedCache):
        prefill_chunk = cache.chunk if prefill_chunk is None else prefill_chunk
    can_capture = tokens.is_cuda and isinstance(cache, PackedRows) and _runs_without_host(model, tokens.device)
    if graph and not can_capture:
        raise ValueError(
            "graph=True needs a static cache (capacity='static') on a GPU that the kernels can use, or a bounded one"
        )
    graph = can_capture and max_new_tokens >= MIN_TOKENS_FOR_GRAPH if graph is None else graph
    stops = _as_tensor(stop_tokens, tokens.device)
    return _generate_columns(
        model, tokens, max_new_tokens, key_mask, sampling, generator, stops, symbols, cache, prefill_chunk, graph
    )


@torch.no_grad()
def _generate_columns(
    model: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    key_mask: Tensor | None,
    sampling: Sampling,
    generator: torch.Generator | None,
    stops: Tensor | None,
    symbols: int,
    cache: Cache | PackedRows,
    prefill_chunk: int | None,
    graph: bool,
) -> Iterator[Tensor]:
    noise = torch.empty(len(tokens), symbols, device=tokens.device) if sampling.draws else None

    def choose(logits: Tensor) -> Tensor:
        return sampling.choose(logits[:, :symbols], noise)

    def step(token: Tensor) -> Tensor:
        """Return the next token of `token` `[B, 1]`, with the current noise. A CUDA graph captures this function."""
        nonlocal key_mask
        if key_mask is not None:
            key_mask = F.pad(key_mask, (0, 1), value=True)
        chosen = choose(model(token, key_mask, cache)[:, -1])
        return chosen if stops is None else torch.where(_is_one_of(token, stops), token, chosen)

    _draw_noise(noise, generator)
    logits = model.lm_head(prefill(model, tokens, key_mask, cache, prefill_chunk))
    if bool(logits.isnan().any()):
        raise ValueError("the model's logits are NaN: there is no token to choose")
    token = choose(logits)
    if isinstance(cache, PackedRows):
        key_mask = None  # such a cache holds no padding
    yield token[:, 0]
    next_token: Callable[[Tensor], Tensor] = step
    for done in range(1, max_new_tokens):
        _draw_noise(noise, generator)
        if graph and done <= WARM_UP_STEPS:
            token = _run_on_side_stream(step, token)
        else:
            if graph and done == WARM_UP_STEPS + 1:
                assert isinstance(cache, PackedRows)
                next_token = _capture_step(step, cache, token)
            token = next_token(token)
        yield token[:, 0]


@torch.no_grad()
def prefill(
    model: Decoder,
    tokens: Tensor,
    key_mask: Tensor | None,
    cache: Cache | PackedRows,
    chunk: int | None = None,
) -> Tensor:
    """Read prompts `[B, T]` into a cache, `chunk` tokens at a time.

    Returns:
        `[B, d_model]`: the hidden state of each row's last real token, also if padding follows it.
    """
    batch, length = tokens.shape
    rows = torch.arange(batch, device=tokens.device)
    last = torch.full_like(rows, length - 1)
    if key_mask is not None:
        last -= key_mask.flip(-1).int().argmax(-1)
    found: Tensor | None = None
    for start in range(0, length, chunk or length):
        end = min(start + (chunk or length), length)
        hidden = model.hidden(tokens[:, start:end], None if key_mask is None else key_mask[:, :end], cache)
        last_in_chunk = hidden[rows, (last - start).clamp(0, end - start - 1)]
        found = last_in_chunk if found is None else torch.where((last >= start)[:, None], last_in_chunk, found)
    assert found is not None
    return found


def _check_cache(model: Decoder, cache: Cache | PackedRows, needed: int, capacity: int | str | None) -> None:
    if capacity is not None:
        raise ValueError(f"give either cache or capacity, got both (capacity={capacity!r})")
    if cache.length:
        raise ValueError(f"cache must be empty, got one with {cache.length:,} tokens")
    if len(cache.layers) != model.config.n_layers:
        raise ValueError(f"the cache has {len(cache.layers)} layers, the model {model.config.n_layers}")
    if isinstance(cache, StaticCache) and cache.capacity < needed:
        raise ValueError(f"a static cache of {cache.capacity:,} tokens can't hold the {needed:,} of prompt and text")


def _runs_without_host(model: Decoder, device: torch.device) -> bool:
    """Return whether a step never waits for the device. TRA without the kernels does wait."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else model.lm_head.weight.dtype
    return all(
        layer.impl == "triton" or (layer.impl == "auto" and auto_takes_triton(device, dtype, layer.head_width))
        for layer in model.modules()
        if isinstance(layer, ThresholdRelativeAttention)
    )


def _run_on_side_stream(step: Callable[[Tensor], Tensor], token: Tensor) -> Tensor:
    """Run a step on a side stream, as PyTorch recommends before a capture."""
    current, side = torch.cuda.current_stream(token.device), torch.cuda.Stream(token.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        token = step(token)
    current.wait_stream(side)
    return token


def _capture_step(step: Callable[[Tensor], Tensor], cache: PackedRows, token: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a step as a CUDA graph: one launch. The memory that it reads and writes is fixed."""
    graph_input, graph, length = token.clone(), torch.cuda.CUDAGraph(), cache.length
    with torch.cuda.device(token.device), torch.cuda.graph(graph):
        chosen = step(graph_input)
    cache.length = length  # capturing a step doesn't run it

    def replay(token: Tensor) -> Tensor:
        graph_input.copy_(token)
        graph.replay()
        cache.length += 1  # the graph only changes the device
        return chosen.clone()

    return replay


def _draw_noise(noise: Tensor | None, generator: torch.Generator | None) -> None:
    """Fill `noise` in place. This happens outside of the graph, so that the draws are the same with and without one."""
    if noise is not None:
        noise.exponential_(generator=generator).clamp_(min=TINY)  # log(0) would cancel a -inf


def _checked_mask(tokens: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """Return the mask, or None if it hides no token, which is faster."""
    check_masks(tokens, key_mask, 0, None)
    if key_mask is None or bool(key_mask.all()):
        return None
    has_tokens = key_mask.any(-1)
    if not bool(has_tokens.all()):
        empty = int(has_tokens.int().argmin())
        raise ValueError(f"a prompt has at least one token, but row {empty} of key_mask is all False")
    return key_mask


def _stop_check_interval(column: Tensor, streaming: bool) -> int:
    """Return the tokens between two checks: 1 when streaming, which waits for the device anyway."""
    return STOP_CHECK_INTERVAL if column.is_cuda and not streaming else 1


def _as_tensor(stop_tokens: Sequence[int], device: torch.device) -> Tensor | None:
    return torch.tensor(stop_tokens, device=device) if len(stop_tokens) else None


def _is_one_of(tokens: Tensor, stops: Tensor) -> Tensor:
    return (tokens[..., None] == stops).any(-1)
