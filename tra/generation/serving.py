"""Serve many requests at once. They join and leave between steps, and share one pool of pages.

A step reads a chunk of one prompt, then decodes one token of every other request (continuous batching, Yu et al. 2022).
Pages are allocated as they are needed (Kwon et al. 2023). Texts with the same beginning share its full pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tra.attention.shared.paged_cache import layer_windows
from tra.attention.shared.pages import PAGE_SIZE
from tra.attention.shared.pooled_cache import PooledCache
from tra.generation.page_pool import PagePool, page_keys
from tra.generation.requests import Completion, Request, Text
from tra.generation.sampling import TINY

if TYPE_CHECKING:
    from tra.model import Decoder


class Server:
    """Generates text for many requests with a fixed number of pages.

    Each text is the one that its request would get alone, up to rounding: products may round differently in batches of
    other sizes. In float32, greedy texts are equal. If pages run out, the request that joined last gives its pages
    back, and reads its text again later.

    Args:
        model: A decoder of TRA or rope, in eval mode.
        pages: Pages of the pool, each of 64 tokens in all layers.
        windows: Tokens that queries see, one number for all layers or one for each, as for `BoundedCache`; None is all.
            Pages that no window reaches any more are given back.
        max_rows: Requests that are decoded at once.
        prefill_chunk: Tokens of a prompt that are read between two steps of decoding.
        vocabulary: Only ids below it are generated; all by default.
        stream: Called with a request's number and its next token.
    """

    def __init__(
        self,
        model: Decoder,
        pages: int,
        *,
        windows: int | Sequence[int] | None = None,
        max_rows: int = 32,
        prefill_chunk: int = 256,
        vocabulary: int | None = None,
        stream: Callable[[int, int], None] | None = None,
    ) -> None:
        for name, value in (("pages", pages), ("max_rows", max_rows), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._model, self._stream, self._max_rows = model, stream, max_rows
        self._chunk, self._n_pages = prefill_chunk, pages
        self._vocabulary = model.config.vocab_size if vocabulary is None else vocabulary
        if not 1 <= self._vocabulary <= model.config.vocab_size:
            raise ValueError(f"vocabulary must lie in 1..{model.config.vocab_size}, the model's, got {vocabulary}")
        self._window = None if windows is None else max(layer_windows(model.config.n_layers, windows))
        self._cache = PooledCache(model.config.n_layers, pages, windows)
        self._pool = PagePool(pages)
        self._device = model.lm_head.weight.device
        self._waiting: deque[Text] = deque()
        self._running: list[Text] = []
        """In the order in which they joined."""
        self._finished: list[Completion] = []
        """What the next step returns: kept here, as a step may end with an error after a request is finished."""
        self._unheard: deque[tuple[int, int]] = deque()
        """Numbers and tokens for `stream`."""
        self._count = 0

    @property
    def waiting(self) -> int:
        """Number of requests that have no pages yet."""
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._waiting or self._running or self._finished)

    def submit(self, request: Request) -> int:
        """Queue a request, and return its number. The request joins when there is room.

        Raises:
            ValueError: If the request is malformed, or doesn't fit into the whole pool.
        """
        tokens, symbols = [int(token) for token in request.tokens], self._model.config.vocab_size
        if not tokens or min(tokens) < 0 or max(tokens) >= symbols:
            raise ValueError(f"a prompt has at least one token, all in 0..{symbols - 1}, got {_extremes(tokens)}")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        if any(not 0 <= stop < self._vocabulary for stop in request.stop_tokens):
            raise ValueError(f"stop tokens must lie in 0..{self._vocabulary - 1}, got {list(request.stop_tokens)}")
        needed = self._most_pages(len(tokens) + request.max_new_tokens - 1)
        if needed > self._n_pages:
            raise ValueError(
                f"a prompt of {len(tokens):,} tokens and {request.max_new_tokens:,} new ones need {needed:,} pages of "
                f"{PAGE_SIZE} tokens, the pool has {self._n_pages:,}"
            )
        generator = None
        if request.sampling.draws:
            generator = torch.Generator(self._device)
            generator.seed() if request.seed is None else generator.manual_seed(request.seed)
        self._waiting.append(Text(self._count, request, generator, tokens))
        self._count += 1
        return self._count - 1

    def cancel(self, number: int) -> bool:
        """Drop a request and free its pages; it is never returned. It may be called from within `stream`.

        Returns:
            Whether it was unfinished.
        """
        for texts in (self._waiting, self._running):
            for text in texts:
                if text.number == number:
                    texts.remove(text)
                    self._free_pages(text)
                    return True
        return False

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Read a chunk of one prompt, and decode a token of each request that has read its own.

        After an error, as of `stream` or for lack of memory, the server can go on: no token is lost.

        Returns:
            What is finished.
        """
        self._tell()
        self._join()
        self._read_chunk()
        self._decode()
        finished, self._finished = self._finished, []
        return finished

    def _join(self) -> None:
        reading = (text for text in self._running if text.reads_prompt)
        promised = sum(max(0, self._most_pages(len(text.tokens)) - len(text.pages)) for text in reading)
        while self._waiting and len(self._running) < self._max_rows:
            needed = self._most_pages(len(self._waiting[0].tokens))
            if promised + needed > self._pool.available:
                return
            promised += needed
            self._running.append(self._waiting.popleft())

    def _most_pages(self, tokens: int) -> int:
        """Return the most pages that a text with `tokens` stored tokens may have at once."""
        all_pages = -(-tokens // PAGE_SIZE)
        if self._window is None:
            return all_pages
        return min(all_pages, (self._window + self._chunk + PAGE_SIZE - 3) // PAGE_SIZE + 1)

    def _read_chunk(self) -> None:
        text = next((text for text in self._running if text.reads_prompt), None)
        if text is None:
            return
        self._share_pages(text)
        if not text.reads_prompt:  # all but the last token was known, which is decoded with the others
            return
        start, end = text.stored, min(text.stored + self._chunk, len(text.tokens))
        if end < len(text.tokens) and end // PAGE_SIZE * PAGE_SIZE > start:
            end -= end % PAGE_SIZE  # so that the next chunk may begin with shared pages
        if not self._has_pages(text, end):
            return
        hidden = self._run([text], torch.tensor([text.tokens[start:end]], device=self._device))
        chosen = self._choose([text], hidden) if end == len(text.tokens) else []
        page_keys(text.tokens, text.keys, end // PAGE_SIZE)
        for page in range(start // PAGE_SIZE, end // PAGE_SIZE):
            self._pool.remember(text.pages[page], text.keys[page])
        self._advance(text, end)
        if chosen:
            self._add_tokens([text], chosen)

    def _decode(self) -> None:
        for text in list(self._running):  # the oldest first: those that come later may lose their pages
            if text in self._running and not text.reads_prompt:
                self._has_pages(text, len(text.tokens))
        rows = [text for text in self._running if not text.reads_prompt]
        if not rows:
            return
        hidden = self._run(rows, torch.tensor([text.tokens[-1:] for text in rows], device=self._device))
        chosen = self._choose(rows, hidden)
        for text in rows:
            self._advance(text, len(text.tokens))
        self._add_tokens(rows, chosen)

    def _share_pages(self, text: Text) -> None:
        """Use pages that another text has filled with the same beginning. The last token is always read."""
        while text.stored % PAGE_SIZE == 0 and text.stored + PAGE_SIZE < len(text.tokens):
            number = text.stored // PAGE_SIZE
            page_keys(text.tokens, text.keys, number + 1)
            page = self._pool.find(text.keys[number])
            if page is None:
                return
            text.pages[number] = page
            self._advance(text, text.stored + PAGE_SIZE)

    def _has_pages(self, text: Text, end: int) -> bool:
        """Allocate pages for a text up to token `end`. If none are left, the text that joined last loses its own."""
        for number in range(text.stored // PAGE_SIZE, -(-end // PAGE_SIZE)):
            if number in text.pages:
                continue
            while (page := self._pool.take()) is None:
                last = self._running.pop()
                self._free_pages(last)
                self._waiting.appendleft(last)
                if last is text:
                    return False
            text.pages[number] = page
        return True

    def _free_pages(self, text: Text) -> None:
        """Give back all pages of a text, which would have to be read again."""
        for page in text.pages.values():
            self._pool.release(page)
        text.pages, text.stored = {}, 0

    def _run(self, rows: list[Text], tokens: Tensor) -> Tensor:
        """Return hidden states of the rows' last tokens, `[B, d_model]`."""
        columns = max(max(text.pages) - min(text.pages) + 1 for text in rows)
        table = [[0] * columns for _ in rows]  # entries without a page are never read
        for row, text in zip(table, rows, strict=True):
            for number, page in text.pages.items():
                row[number % columns] = page
        lengths = torch.tensor([text.stored for text in rows], device=self._device)
        self._cache.select(torch.tensor(table, dtype=torch.int32, device=self._device), lengths)
        return self._model.hidden(tokens, None, self._cache)[:, -1]

    def _advance(self, text: Text, stored: int) -> None:
        """Set the number of stored tokens, and give back pages that no later query sees."""
        text.stored = stored
        if self._window is not None:
            beyond = (stored - self._window + 1) // PAGE_SIZE
            for number in [number for number in text.pages if number < beyond]:
                self._pool.release(text.pages.pop(number))

    def _choose(self, rows: list[Text], hidden: Tensor) -> list[int]:
        """Return the next token of each text."""
        logits = self._model.lm_head(hidden)[:, : self._vocabulary]
        if bool(logits.isnan().any()):
            raise ValueError("the model's logits are NaN: there is no token to choose")
        chosen = logits.argmax(-1)
        for row, text in enumerate(rows):
            if text.generator is not None:
                noise = torch.empty_like(logits[row : row + 1], dtype=torch.float32)
                noise.exponential_(generator=text.generator).clamp_(min=TINY)
                chosen[row] = text.request.sampling.choose(logits[row : row + 1], noise)[0, 0]
        tokens: list[int] = chosen.tolist()
        return tokens

    def _add_tokens(self, rows: list[Text], chosen: list[int]) -> None:
        """Add a token to each text, and end those that are finished; then tell `stream`."""
        for text, token in zip(rows, chosen, strict=True):
            text.tokens.append(token)
            if len(text.new_tokens) == text.request.max_new_tokens or token in text.request.stop_tokens:
                self._running.remove(text)
                self._free_pages(text)
                self._finished.append(Completion(text.number, text.request, text.new_tokens))
            self._unheard.append((text.number, token))
        self._tell()

    def _tell(self) -> None:
        """Call `stream` with the tokens that it hasn't got yet. Where it raises an error, the next step goes on."""
        while self._unheard:
            number, token = self._unheard.popleft()
            if self._stream is not None:
                self._stream(number, token)


def serve(
    model: Decoder,
    requests: Iterable[Request],
    pages: int,
    *,
    windows: int | Sequence[int] | None = None,
    max_rows: int = 32,
    prefill_chunk: int = 256,
    vocabulary: int | None = None,
    stream: Callable[[int, int], None] | None = None,
) -> Iterator[Completion]:
    """Yield requests as they are finished. New ones are taken one by one, a few before there is room for them.

    The arguments are those of `Server`.
    """
    server = Server(
        model,
        pages,
        windows=windows,
        max_rows=max_rows,
        prefill_chunk=prefill_chunk,
        vocabulary=vocabulary,
        stream=stream,
    )
    for request in requests:
        server.submit(request)
        while server.waiting >= max_rows:
            yield from server.step()
    while server.is_busy:
        yield from server.step()


def _extremes(tokens: list[int]) -> str:
    return f"{min(tokens)}..{max(tokens)}" if tokens else "none"
