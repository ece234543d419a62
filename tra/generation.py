"""How text goes on: prompts into a cache, the choice of a token, steps on the cache, on a GPU as a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention import Cache, StaticCache, ThresholdRelativeAttention
from tra.attention.shared.base import check_masks
from tra.ops.choice import auto_takes_triton

if TYPE_CHECKING:
    from tra.model import Decoder

LOOK_EVERY = 16
"""Tokens between two looks at whether a GPU's rows are finished: each look waits for the device."""
WARM_UP = 2
"""Steps before one is captured. They count: what they choose is text."""
WORTH_A_GRAPH = 16
"""New tokens below which capturing a step costs more than it saves."""

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the likeliest at temperature 0, otherwise drawn.

    Logits are divided by the temperature, then cut to the `top_k`, then to the nucleus of what is left: the order of
    transformers.
    """

    temperature: float = 0.0
    """Above 1 evens out, below 1 sharpens."""
    top_k: int | None = None
    """Only so many of the likeliest tokens, and what is as likely as the last of them."""
    top_p: float | None = None
    """Only the smallest set of tokens whose mass reaches it, and what is as likely as the last of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")

    @property
    def draws(self) -> bool:
        return self.temperature > 0

    def cut(self, logits: Tensor) -> Tensor:
        """What is drawn from: `[B, V]` -> the same in float32, the largest 0, -inf where a token is out."""
        logits = logits.float()
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, TINY)  # so nothing overflows
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered = logits.sort(descending=True).values
            mass = ordered.softmax(-1)
            before = mass.cumsum(-1) - mass  # of all that is likelier: 0 for the first, which always stays
            least = ordered.masked_fill(before >= self.top_p, torch.inf).amin(-1, keepdim=True)
            logits = logits.masked_fill(logits < least, -torch.inf)
        return logits

    def choose(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """`[B, V]` -> `[B, 1]`. Logits plus Gumbel noise, -log of Exp(1) `noise`, are largest at a drawn token."""
        if noise is None:
            return logits.argmax(-1, keepdim=True)
        return (self.cut(logits) - noise.log()).argmax(-1, keepdim=True)


GREEDY = Sampling()


def collect(
    columns: Iterator[Tensor], stop_tokens: Sequence[int] = (), stream: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Columns `[B]` as `[B, N]`, each shown to `stream`; up to the one in which the last row says a stop token."""
    new: list[Tensor] = []
    stops: Tensor | None = None
    for column in columns:
        new.append(column)
        if stream is not None:
            stream(column)
        if not stop_tokens:
            continue
        stops = _as_tensor(stop_tokens, column.device) if stops is None else stops
        # A finished row says its stop token over and over, so the last column tells.
        look = len(new) % _looks_every(column, stream is not None) == 0
        if look and stops is not None and bool(_is_one_of(column, stops).all()):
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
    prefill_chunk: int | None = None,
    graph: bool | None = None,
) -> Iterator[Tensor]:
    """The new tokens of `[B, T]` prompts, one column `[B]` after another, as they come.

    Whoever has read enough stops asking. The arguments, which are checked at once, are those of `Decoder.generate`.
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
    cache = model.new_cache(needed if isinstance(capacity, str) else capacity)
    could = tokens.is_cuda and isinstance(cache, StaticCache) and _stays_on_the_device(model, tokens.device)
    if graph and not could:
        raise ValueError("graph=True needs a static cache (capacity='static') on a GPU that the kernels can use")
    graph = could and max_new_tokens >= WORTH_A_GRAPH if graph is None else graph
    stops = _as_tensor(stop_tokens, tokens.device)
    return _columns(
        model, tokens, max_new_tokens, key_mask, sampling, generator, stops, symbols, cache, prefill_chunk, graph
    )


@torch.no_grad()
def _columns(
    model: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    key_mask: Tensor | None,
    sampling: Sampling,
    generator: torch.Generator | None,
    stops: Tensor | None,
    symbols: int,
    cache: Cache | StaticCache,
    prefill_chunk: int | None,
    graph: bool,
) -> Iterator[Tensor]:
    noise = torch.empty(len(tokens), symbols, device=tokens.device) if sampling.draws else None

    def choose(logits: Tensor) -> Tensor:
        return sampling.choose(logits[:, :symbols], noise)

    def step(token: Tensor) -> Tensor:
        """From a new token `[B, 1]` to the next, with the noise that is there: what a graph holds."""
        nonlocal key_mask
        if key_mask is not None:
            key_mask = F.pad(key_mask, (0, 1), value=True)
        chosen = choose(model(token, key_mask, cache)[:, -1])
        return chosen if stops is None else torch.where(_is_one_of(token, stops), token, chosen)

    _redraw(noise, generator)
    logits = model.head(prefill(model, tokens, key_mask, cache, prefill_chunk))
    if bool(logits.isnan().any()):
        raise ValueError("the model's logits are NaN: there is no token to choose")
    token = choose(logits)
    if isinstance(cache, StaticCache):
        key_mask = None  # it holds no padding
    yield token[:, 0]
    next_token: Callable[[Tensor], Tensor] = step
    for done in range(1, max_new_tokens):
        _redraw(noise, generator)
        if graph and done <= WARM_UP:
            token = _aside(step, token)
        else:
            if graph and done == WARM_UP + 1:
                assert isinstance(cache, StaticCache)
                next_token = _captured(step, cache, token)
            token = next_token(token)
        yield token[:, 0]


@torch.no_grad()
def prefill(
    model: Decoder,
    tokens: Tensor,
    key_mask: Tensor | None,
    cache: Cache | StaticCache,
    chunk: int | None = None,
) -> Tensor:
    """Read prompts `[B, T]` into a cache, `chunk` tokens at a time.

    Returns:
        `[B, d_model]`: what the head reads at each row's last real token, which right padding doesn't move.
    """
    batch, length = tokens.shape
    rows = torch.arange(batch, device=tokens.device)
    last = torch.full_like(rows, length - 1)
    if key_mask is not None:
        last -= key_mask.flip(-1).int().argmax(-1)
    found: Tensor | None = None
    for start in range(0, length, chunk or length):
        end = min(start + (chunk or length), length)
        read = model.hidden(tokens[:, start:end], None if key_mask is None else key_mask[:, :end], cache)
        here = read[rows, (last - start).clamp(0, end - start - 1)]
        found = here if found is None else torch.where((last >= start)[:, None], here, found)
    assert found is not None
    return found


def _stays_on_the_device(model: Decoder, device: torch.device) -> bool:
    """TRA's walk in PyTorch, which is all there is without the kernels, asks the device how far to go."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else model.head.weight.dtype
    return all(
        layer.impl == "triton" or (layer.impl == "auto" and auto_takes_triton(device, dtype, layer.head_width))
        for layer in model.modules()
        if isinstance(layer, ThresholdRelativeAttention)
    )


def _aside(step: Callable[[Tensor], Tensor], token: Tensor) -> Tensor:
    """A step on a stream of its own, as what comes before a capture should be."""
    current, side = torch.cuda.current_stream(token.device), torch.cuda.Stream(token.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        token = step(token)
    current.wait_stream(side)
    return token


def _captured(step: Callable[[Tensor], Tensor], cache: StaticCache, token: Tensor) -> Callable[[Tensor], Tensor]:
    """A step as a CUDA graph: one launch. All that it reads and writes stays where it is."""
    given, graph, length = token.clone(), torch.cuda.CUDAGraph(), cache.length
    with torch.cuda.device(token.device), torch.cuda.graph(graph):
        chosen = step(given)
    cache.length = length  # written down, not done

    def replay(token: Tensor) -> Tensor:
        given.copy_(token)
        graph.replay()
        cache.length += 1  # the graph knows of the device alone
        return chosen.clone()

    return replay


def _redraw(noise: Tensor | None, generator: torch.Generator | None) -> None:
    """In place, and outside of graphs: draws come from the generator as they do without one."""
    if noise is not None:
        noise.exponential_(generator=generator).clamp_(min=TINY)  # log of 0 would undo a -inf


def _checked_mask(tokens: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """The mask, or None where it hides nothing: then kernels needn't look at it."""
    check_masks(tokens, key_mask, 0, None)
    if key_mask is None or bool(key_mask.all()):
        return None
    some = key_mask.any(-1)
    if not bool(some.all()):
        empty = int(some.int().argmin())
        raise ValueError(f"a prompt has at least one token, but row {empty} of key_mask is all False")
    return key_mask


def _looks_every(column: Tensor, streaming: bool) -> int:
    """Who streams waits for the device anyway, and must not be told what comes after the end."""
    return LOOK_EVERY if column.is_cuda and not streaming else 1


def _as_tensor(stop_tokens: Sequence[int], device: torch.device) -> Tensor | None:
    return torch.tensor(stop_tokens, device=device) if len(stop_tokens) else None


def _is_one_of(tokens: Tensor, stops: Tensor) -> Tensor:
    return (tokens[..., None] == stops).any(-1)
