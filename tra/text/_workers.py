"""Encoding in processes of their own, in order, with a bounded amount of text under way.

A worker reads pickled batches from its standard input and answers on its standard output, so it ends by itself when
the process that feeds it is gone, however that went.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tra.text._formats import Piece
from tra.text.store import Encoded
from tra.text.tokenizer import Tokenizer, load_tokenizer

BATCH = 2**18
"""Characters that go to a worker at once."""

# The package without its __init__, which would bring torch into every worker: seconds, and 200 MB each.
_BOOT = """
import sys, types
package = types.ModuleType("tra")
package.__path__ = [sys.argv[1]]
sys.modules["tra"] = package
from tra.text._workers import serve
serve(*sys.argv[2:])
"""


class WorkerError(Exception):
    """A process that encodes has died."""


def encode_all(items: Iterable[Piece | Encoded], tokenizer: Tokenizer, jobs: int) -> Generator[Encoded, None, None]:
    """Every piece as ids, in order; what is encoded already passes through. One job stays in this process."""
    batches = _batches(items)
    if jobs == 1:
        for batch in batches:
            yield from encode_batch(batch, tokenizer)
        return
    workers = [_Worker(tokenizer) for _ in range(jobs)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def encode(batch: list[Piece | Encoded]) -> list[Encoded]:
        worker = idle.get()  # there is one: no more threads than workers
        try:
            return worker.encode(batch)
        finally:
            idle.put(worker)

    # A thread waits for one worker at a time, so no full pipe can block another.
    threads = ThreadPoolExecutor(jobs)
    try:
        under_way: deque[Future[list[Encoded]]] = deque()
        for batch in batches:
            under_way.append(threads.submit(encode, batch))
            if len(under_way) > 2 * jobs:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    finally:
        for worker in workers:
            worker.process.kill()
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.close()


def encode_batch(batch: list[Piece | Encoded], tokenizer: Tokenizer) -> list[Encoded]:
    pieces = [item for item in batch if isinstance(item, Piece)]
    ids = iter(tokenizer.encode_many([piece.text for piece in pieces]))
    encoded = []
    for item in batch:
        if isinstance(item, Piece):
            raw = item.text.encode()
            item = Encoded(item.begins, next(ids), len(raw), len(raw.split()))
        encoded.append(item)
    return encoded


def serve(name: str, files: str) -> None:
    """What a worker does."""
    tokenizer = load_tokenizer(name, Path(files) if files else None)
    while True:
        try:
            batch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(encode_batch(batch, tokenizer), sys.stdout.buffer, protocol=5)
        sys.stdout.buffer.flush()


class _Worker:
    def __init__(self, tokenizer: Tokenizer) -> None:
        package = Path(__file__).parents[1]
        arguments = [str(package), tokenizer.name, str(tokenizer.files.resolve()) if tokenizer.files else ""]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the process that feeds it
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )

    def encode(self, batch: list[Piece | Encoded]) -> list[Encoded]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            pickle.dump(batch, self.process.stdin, protocol=5)
            self.process.stdin.flush()
            encoded: list[Encoded] = pickle.load(self.process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            raise WorkerError(f"a worker ended with status {self.process.wait()}: out of memory?") from None
        return encoded

    def close(self) -> None:
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # of what it was not given any more
                stream.close()


def _batches(items: Iterable[Piece | Encoded]) -> Iterator[list[Piece | Encoded]]:
    batch: list[Piece | Encoded] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.text) if isinstance(item, Piece) else len(item.ids)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
