"""Encode text in threads, in order, with a bounded amount of text in memory.

The tokenizer's library releases Python's lock while it encodes a batch, so threads are as fast as processes. Its own
threads are switched off meanwhile: their number could not be set for each call.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from tra.text.formats import TextPart
from tra.text.store import TokenPart
from tra.text.tokenizer import Tokenizer

BATCH_CHARACTERS = 2**18
"""Characters that a thread encodes at once."""

LIBRARY_THREADS = "TOKENIZERS_PARALLELISM"
"""The variable that the `tokenizers` library reads at every call."""


def encode_parts(
    parts: Iterable[TextPart | TokenPart], tokenizer: Tokenizer, jobs: int
) -> Generator[TokenPart, None, None]:
    """Yield every part as ids, in order, encoded in `jobs` threads. Parts that are ids already are passed on."""
    before = os.environ.get(LIBRARY_THREADS)
    os.environ[LIBRARY_THREADS] = "false"
    threads = ThreadPoolExecutor(jobs)
    try:
        waiting: deque[Future[list[TokenPart]]] = deque()
        for batch in _batches(parts):
            waiting.append(threads.submit(_encode_batch, batch, tokenizer))
            if len(waiting) > 2 * jobs:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)
        del os.environ[LIBRARY_THREADS]
        if before is not None:
            os.environ[LIBRARY_THREADS] = before


def _encode_batch(batch: list[TextPart | TokenPart], tokenizer: Tokenizer) -> list[TokenPart]:
    ids = iter(tokenizer.encode_many([part.text for part in batch if isinstance(part, TextPart)]))
    encoded = []
    for part in batch:
        if isinstance(part, TextPart):
            raw = part.text.encode()
            part = TokenPart(part.begins, next(ids), len(raw), len(raw.split()))
        encoded.append(part)
    return encoded


def _batches(parts: Iterable[TextPart | TokenPart]) -> Iterator[list[TextPart | TokenPart]]:
    batch: list[TextPart | TokenPart] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part.text) if isinstance(part, TextPart) else len(part.ids)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
