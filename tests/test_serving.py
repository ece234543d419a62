"""Serving: every text is that of its request alone, whatever joins, leaves, waits, or shares its pages."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch

import tra
from tests.attention.test_cache import VOCABULARY, decoder
from tests.slow import slow
from tra.attention import BoundedCache
from tra.generation import Request, Sampling, Server, serve
from tra.generation.page_pool import PagePool, page_keys

MECHANISM = pytest.mark.parametrize("mechanism", ["tra", "rope", *slow("tra-threshold-only")])
DRAWN = Sampling(1.3, 7, 0.8)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def alone(model: tra.Decoder, request: Request, windows: int | list[int] | None = None) -> list[int]:
    """What `generate` says."""
    sampling, device = request.sampling, model.lm_head.weight.device
    generator = None if request.seed is None else torch.Generator(device).manual_seed(request.seed)
    drawn = (sampling.temperature, generator)
    more = {"top_k": sampling.top_k, "top_p": sampling.top_p, "stop_tokens": request.stop_tokens}
    cache = None if windows is None else BoundedCache(2, windows)
    ids = torch.tensor([request.tokens], device=device)
    return model.generate(ids, request.max_new_tokens, None, *drawn, cache=cache, **more)[0].tolist()  # type: ignore[arg-type]


def requests() -> list[Request]:
    """Short and long, some with the same beginning, drawn ones, one that stops, one of a single token."""
    shared = prompt(150, seed=1)
    return [
        Request(prompt(9), 60),
        Request(shared + prompt(20, seed=2), 5),
        Request(prompt(1, seed=3), 12, DRAWN, seed=5),
        Request(shared, 3),
        Request(shared + prompt(7, seed=4), 9, DRAWN, seed=6),
        Request(prompt(64, seed=5), 2),
        Request(prompt(65, seed=6), 12, stop_tokens=[2, 3]),
        Request(shared[:128], 9),
    ]


def check(model: tra.Decoder, pages: int, windows: int | list[int] | None = None, **options: int) -> None:
    asked = requests()
    found = {each.number: each for each in serve(model, asked, pages, windows=windows, **options)}  # type: ignore[arg-type]
    for number, request in enumerate(asked):
        assert found[number].request is request
        assert found[number].tokens == alone(model, request, windows), number


@MECHANISM
@pytest.mark.parametrize("pages", [30, *slow(5)])
def test_every_text_is_that_of_its_request(mechanism: str, pages: int) -> None:
    check(decoder(mechanism).float(), pages, prefill_chunk=64)


@pytest.mark.parametrize(("max_rows", "prefill_chunk"), [(2, 100), *slow((1, 1), (8, 1000))])
def test_however_rows_and_chunks_are_cut(max_rows: int, prefill_chunk: int) -> None:
    check(decoder("tra").float(), 20, max_rows=max_rows, prefill_chunk=prefill_chunk)


@MECHANISM
def test_windows_as_in_a_bounded_cache(mechanism: str) -> None:
    check(decoder(mechanism).float(), 12, [20, 70], prefill_chunk=64)


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [None, [20, 70]])
def test_on_a_gpu(windows: list[int] | None) -> None:
    check(decoder("tra", d_model=64).float().cuda(), 12, windows, prefill_chunk=64)


def watched(server: Server) -> Iterator[tuple[int, int]]:
    """Pages in use and rows after each step."""
    while server.is_busy:
        server.step()
        yield server._n_pages - server._pool.available, len(server._running)


def test_memory_is_never_more_than_the_pool() -> None:
    """Three texts of three pages each, in a pool of four: those that come later lose their pages, and come back."""
    model, said, heard = decoder("tra").float(), {}, []
    asked = [Request(prompt(60, seed=seed), 75) for seed in range(3)]
    server = Server(model, 4, stream=lambda number, token: heard.append((number, token)))
    for request in asked:
        server.submit(request)
    lost, most = 0, 0
    while server.is_busy:
        before = {text.number for text in server._running}
        for completion in server.step():
            said[completion.number] = completion.tokens
        lost += len(before - {text.number for text in server._running} - set(said))
        most = max(most, 4 - server._pool.available)
    assert lost
    assert most == 4
    assert server._pool.available == 4
    for number, request in enumerate(asked):
        assert said[number] == alone(model, request)
        assert [token for name, token in heard if name == number] == said[number]


def test_requests_wait_for_pages() -> None:
    """A prompt joins when all of it has room, and in turn."""
    server = Server(decoder("tra").float(), 5, prefill_chunk=64)
    for length in (200, 200, 5):
        server.submit(Request(prompt(length, seed=length), 3))
    server.step()
    assert (len(server._running), server.waiting) == (1, 2)
    rows = [rows for _, rows in watched(server)]
    assert max(rows) == 2
    assert rows[-1] == 0


def test_a_shared_beginning_is_stored_and_read_once() -> None:
    model, read = decoder("tra").float(), []
    model.embed_tokens.register_forward_hook(lambda *given: read.append(given[2].shape[1]))
    shared, server = prompt(256, seed=1), Server(model, 20, prefill_chunk=256)
    for seed in range(4):
        server.submit(Request(shared + prompt(10, seed=10 + seed), 20))
    used = [used for used, _ in watched(server)]
    assert max(used) == 4 + 4
    assert sum(length for length in read if length > 1) == 256 + 4 * 10
    # a text that comes when all others have gone finds the pages still there
    read.clear()
    server.submit(Request([*shared, 1, 2], 2))
    list(watched(server))
    assert read == [2, 1]


def test_the_pages_of_a_window_are_given_back() -> None:
    """A text of any length has as many pages as the window needs."""
    server = Server(decoder("tra").float(), 4, windows=[30, 60], prefill_chunk=64)
    server.submit(Request(prompt(500), 100))
    used = [used for used, _ in watched(server)]
    assert max(used) <= 3
    assert len(used) > 100


def test_requests_are_taken_as_they_are_needed() -> None:
    """An endless stream of them is served."""
    taken: list[int] = []

    def endless() -> Iterator[Request]:
        while True:
            taken.append(len(taken))
            yield Request(prompt(5, seed=len(taken)), 3)

    served = serve(decoder("tra").float(), endless(), 8, max_rows=2)
    assert sorted(next(served).number for _ in range(6)) == list(range(6))
    assert len(taken) < 12


def test_an_error_of_the_listener_loses_no_token() -> None:
    """As when one client of several has gone: the others' texts go on where they were."""
    model = decoder("tra").float()
    heard: list[tuple[int, int]] = []
    said: dict[int, list[int]] = {}

    def listen(number: int, token: int) -> None:
        heard.append((number, token))
        if len(heard) % 4 == 0:
            raise ConnectionError

    asked = requests()
    server, errors = Server(model, 20, prefill_chunk=64, stream=listen), 0
    for request in asked:
        server.submit(request)
    for _ in range(200):
        try:
            said |= {each.number: each.tokens for each in server.step()}
        except ConnectionError:
            errors += 1
    assert errors > 3
    assert not server.is_busy
    assert said == {number: alone(model, request) for number, request in enumerate(asked)}
    for number, tokens in said.items():
        assert [token for name, token in heard if name == number] == tokens


def test_cancelled_requests_free_their_pages() -> None:
    """While they wait, read, and decode, and within the step that gives them a token."""
    model = decoder("tra").float()
    said: dict[int, list[int]] = {}
    asked = [Request(prompt(100, seed=1) + prompt(1 + seed, seed=seed), 70) for seed in range(8)]
    heard: list[tuple[int, int]] = []

    def listen(number: int, token: int) -> None:
        heard.append((number, token))
        if number == 2 and len(heard) > 20:
            server.cancel(2)

    server = Server(model, 9, prefill_chunk=64, max_rows=4, stream=listen)
    for request in asked:
        server.submit(request)
    assert server.cancel(7)
    server.step()
    assert server.cancel(0)
    for _ in range(8):
        said |= {each.number: each.tokens for each in server.step()}
    assert server.cancel(1)
    assert not server.cancel(1)
    while server.is_busy:
        said |= {each.number: each.tokens for each in server.step()}
    assert said == {number: alone(model, asked[number]) for number in (3, 4, 5, 6)}
    assert server._pool.available == 9
    assert not any(server._pool._users)
    assert not server.cancel(3)
    assert not server.cancel(99)


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
def test_random_requests_leave_no_page_behind(seed: int) -> None:
    """Requests that join at any time, share beginnings, wait, lose their pages, are cancelled; and errors of `stream`.

    After every step the pages in use are those of the running texts.
    """
    draws = random.Random(seed)
    mechanism = draws.choice(["tra", "rope", "tra-threshold-only"])
    windows = draws.choice([None, 1, draws.randint(2, 130), [draws.randint(1, 70), draws.randint(1, 200)]])
    model, pages, chunk = decoder(mechanism), draws.randint(5, 14), draws.choice([1, 7, 63, 64, 65, 100, 300])
    beginnings = [[], *([*draws.choices(range(VOCABULARY), k=draws.randint(1, 200))] for _ in range(2))]
    heard: dict[int, list[int]] = {}

    def listen(number: int, token: int) -> None:
        heard.setdefault(number, []).append(token)
        if draws.random() < 0.05:
            raise ConnectionError

    options = {"max_rows": draws.randint(1, 6), "prefill_chunk": chunk}
    server = Server(model, pages, windows=windows, stream=listen, **options)  # type: ignore[arg-type]
    asked: dict[int, Request] = {}
    said: dict[int, list[int]] = {}
    left = 8
    while left or server.is_busy:
        if left and (draws.random() < 0.3 or not server.is_busy):
            beginning = draws.choice(beginnings)
            ids = beginning[: draws.randint(0, len(beginning))] + draws.choices(
                range(VOCABULARY), k=draws.randint(1, 40)
            )
            request = Request(ids, draws.randint(1, 70), *draws.choice([(), (DRAWN, draws.randint(0, 99))]))  # type: ignore[arg-type]
            asked[server.submit(request)] = request
            left -= 1
        if asked and draws.random() < 0.05:
            number = draws.choice(list(asked))
            if server.cancel(number):
                del asked[number]
        with contextlib.suppress(ConnectionError):
            said |= {each.number: each.tokens for each in server.step()}
        assert sum(server._pool._users) == sum(len(text.pages) for text in server._running)
    assert server._pool.available == pages
    assert said == {number: alone(model, request, windows) for number, request in asked.items()}
    assert said == {number: tokens for number, tokens in heard.items() if number in said}


def test_pages_are_handed_out_and_taken_back() -> None:
    pool = PagePool(3)
    pages = [pool.take() for _ in range(3)]
    assert sorted(pages) == [0, 1, 2]  # type: ignore[type-var]
    assert pool.take() is None
    first, second, third = (page for page in pages if page is not None)
    pool.remember(first, b"a")
    pool.remember(second, b"b")
    pool.remember(third, b"a")  # another page has it
    assert pool.find(b"a") == first
    for page in (first, second, third):
        pool.release(page)
    assert pool.available == 2  # the first has another user
    assert pool.find(b"b") == second
    pool.release(second)
    assert pool.take() == third  # which holds nothing that could be shared
    assert pool.take() == second  # unused for longest
    assert pool.find(b"b") is None
    assert pool.available == 0
    pool.release(first)
    assert pool.find(b"a") == first


def test_keys_say_all_that_went_before() -> None:
    first, second = prompt(128, seed=1), prompt(128, seed=2)
    keys: list[list[bytes]] = [[], [], []]
    for text, found in zip((first, first[:64] + second[64:], second[:64] + first[64:]), keys, strict=True):
        page_keys(text, found, 1)
        page_keys(text, found, 2)
    assert keys[0][0] == keys[1][0]
    assert len({*keys[0], *keys[1], *keys[2]}) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, r"a prompt has at least one token, all in 0..10, got none"),
        ({"tokens": [3, 11]}, r"all in 0..10, got 3..11"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"stop_tokens": [11]}, r"stop tokens must lie in 0..10, got \[11\]"),
        (
            {"tokens": [1] * 60, "max_new_tokens": 70},
            "60 tokens and 70 new ones need 3 pages of 64 tokens, the pool has 2",
        ),
    ],
)
def test_bad_requests(changes: dict[str, object], message: str) -> None:
    server = Server(decoder("tra"), 2)
    with pytest.raises(ValueError, match=message):
        server.submit(Request(**{"tokens": [1], "max_new_tokens": 2} | changes))  # type: ignore[arg-type]
    assert not server.is_busy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pages": 0}, "pages must be at least 1, got 0"),
        ({"max_rows": 0}, "max_rows must be at least 1, got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ({"vocabulary": 12}, r"vocabulary must lie in 1..11, the model's, got 12"),
        ({"windows": [1]}, "windows must be one number or one for each of 2 layers, got 1"),
    ],
)
def test_bad_servers(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Server(decoder("tra"), **{"pages": 4} | options)  # type: ignore[arg-type]


def test_bad_models() -> None:
    with pytest.raises(ValueError, match="can't use keys in pages"):
        list(serve(decoder("alibi"), [Request([1], 2)], 4))
    model = decoder("tra")
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(ValueError, match="logits are NaN"):
        list(serve(model, [Request([1], 2)], 4))
