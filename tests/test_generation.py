"""Generation: every way to decode says the same, what is drawn is drawn right, and it ends where it should."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tra
from tests.attention.test_cache import SIDE, STATIC, VOCABULARY, decoder, padded, tokens
from tests.slow import slow
from tra.attention import MECHANISMS, StaticCache
from tra.generation import Sampling, continuation, decoding, prefill
from tra.generation.sampling import TINY

MECHANISM = pytest.mark.parametrize("mechanism", list(MECHANISMS))
SAMPLED = {"temperature": 1.3, "top_k": 7, "top_p": 0.8}


def seeded(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


@torch.no_grad()
def plainly(model: tra.Decoder, prompt: Tensor, new: int) -> list[list[int]]:
    """The likeliest token, then the whole text again."""
    text = prompt
    for _ in range(new):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    return text[:, prompt.shape[1] :].tolist()


@MECHANISM
def test_every_way_to_decode_says_the_same(mechanism: str) -> None:
    """In float32: a growing and a static cache, and prompts in pieces of 1, 3, 7 and all."""
    model, prompt = decoder(mechanism).float(), tokens(2, 11)
    expected = plainly(model, prompt, 6)
    for capacity, chunk in itertools.product((None, "static", 40) if mechanism in STATIC else (None,), (1, 3, 7, None)):
        assert model.generate(prompt, 6, capacity=capacity, prefill_chunk=chunk).tolist() == expected


@MECHANISM
@SIDE
def test_a_batch_is_its_rows_one_by_one(mechanism: str, side: str) -> None:
    model = decoder(mechanism).float()
    ids, mask, prompts = padded([9, 4, 1], 9, side)
    alone = [plainly(model, prompt, 5)[0] for prompt in prompts]
    for capacity, chunk in itertools.product((None, "static") if mechanism in STATIC else (None,), (None, 2)):
        assert model.generate(ids, 5, mask, capacity=capacity, prefill_chunk=chunk).tolist() == alone


@pytest.mark.parametrize("chunk", [1, 3, 7, None])
@pytest.mark.parametrize("mechanism", ["tra", "rope", "lstm"])
@torch.no_grad()
def test_a_prompt_in_pieces_is_the_prompt(mechanism: str, chunk: int | None) -> None:
    """What the head reads at each row's last token, in float64."""
    model = decoder(mechanism)
    ids, mask, prompts = padded([9, 4, 1], 9, "scattered")
    expected = torch.cat([model.hidden(prompt)[:, -1] for prompt in prompts])
    for capacity in (None, 9) if mechanism in STATIC else (None,):
        found = prefill(model, ids, mask, model.new_cache(capacity), chunk)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_long_prompt_is_never_held_whole() -> None:
    """Pieces go through the layers, and the head sees no token but the last."""
    model, seen = decoder("tra"), {"embed_tokens": set(), "lm_head": set()}
    for name, shapes in seen.items():
        model.get_submodule(name).register_forward_hook(lambda *given, s=shapes: s.add(tuple(given[2].shape[:-1])))
    model.generate(tokens(2, 20), 3, prefill_chunk=8)
    assert seen == {"embed_tokens": {(2, 8), (2, 4), (2, 1)}, "lm_head": {(2,), (2, 1)}}


@pytest.mark.parametrize("capacity", ["static", *slow(None)])
def test_the_kernels_say_the_same(capacity: str | None) -> None:
    model, (ids, mask, _) = decoder("tra", d_model=64).float(), padded([20, 6], 20, "left")
    said = []
    for impl in ("reference", "triton"):
        for block in model.layers:
            block.self_attn.impl = impl
        said.append(model.generate(ids, 4, mask, capacity=capacity).tolist())  # type: ignore[arg-type]
    assert said[0] == said[1]


def test_the_likeliest_token_is_a_special_case() -> None:
    model, prompt = decoder("tra"), tokens(3, 5)
    expected = model.generate(prompt, 12).tolist()
    for only in ({"temperature": 2.0, "top_k": 1}, {"temperature": 2.0, "top_p": 1e-9}, {"temperature": 1e-60}):
        assert model.generate(prompt, 12, generator=seeded(0), **only).tolist() == expected


def test_seeds() -> None:
    model, prompt = decoder("tra"), tokens(4, 3)
    first, again, other, static = (
        model.generate(prompt, 20, generator=seeded(seed), capacity=capacity, **SAMPLED)
        for seed, capacity in ((1, None), (1, None), (2, None), (1, "static"))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first, static)


def kept_by_hand(logits: list[float], sampling: Sampling) -> set[int]:
    """The definition, token by token."""
    weights = torch.tensor(logits, dtype=torch.float64).div(sampling.temperature).softmax(-1).tolist()
    order = sorted(range(len(logits)), key=lambda token: -weights[token])[: sampling.top_k]
    total, mass, kept = sum(weights[token] for token in order), 0.0, set()
    for token in order:
        kept.add(token)
        mass += weights[token] / total
        if sampling.top_p is not None and mass >= sampling.top_p < 1:
            break
    return kept


CUTS = [Sampling(t, k, p) for t in (0.3, 1.0, 2.5) for k in (None, 1, 5, 64) for p in (None, 1e-6, 0.4, 0.95, 1.0)]


@pytest.mark.parametrize("sampling", CUTS, ids=str)
def test_what_is_drawn_from(sampling: Sampling) -> None:
    """As by hand, and as transformers cuts. What stays keeps its odds."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(6, 50, generator=seeded(3))
    cut = sampling.filter(logits)
    for row, scores in zip(cut, logits.tolist(), strict=True):
        assert set(row.isfinite().nonzero()[:, 0].tolist()) == kept_by_hand(scores, sampling)
    theirs = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k is not None:
        theirs = TopKLogitsWarper(sampling.top_k)(None, theirs)
    if sampling.top_p is not None and sampling.top_p < 1:  # which transformers asks too
        theirs = TopPLogitsWarper(sampling.top_p)(None, theirs)
    assert torch.equal(cut.isfinite(), theirs.isfinite())
    torch.testing.assert_close(cut.softmax(-1), theirs.softmax(-1))


def test_the_cuts_have_an_order() -> None:
    """Half, three tenths, two tenths: of the two likeliest the first has 5/8, which top_p is to know."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert Sampling(1.0, top_p=0.6).filter(logits).isfinite().tolist() == [[True, True, False]]
    assert Sampling(1.0, top_k=2, top_p=0.6).filter(logits).isfinite().tolist() == [[True, False, False]]
    assert Sampling(0.5, top_p=0.6).filter(logits).isfinite().tolist() == [[True, False, False]]  # 25 of 38 now


def test_draws_have_the_model_s_odds() -> None:
    """Each within five standard deviations, which one set of draws in 100,000 would exceed by chance."""
    sampling, draws = Sampling(0.7, top_k=5, top_p=0.7), 40_000
    logits = torch.randn(1, 9, generator=seeded(1))
    odds = sampling.filter(logits).softmax(-1)[0]
    noise = torch.empty(draws, 9)
    decoding._draw_noise(noise, seeded(2))
    counts = sampling.choose(logits.expand(draws, -1), noise).flatten().bincount(minlength=9)
    assert bool((counts[odds == 0] == 0).all())
    assert 1 < int((odds > 0).sum()) < 5
    assert bool(((counts - draws * odds).abs() <= 5 * (draws * odds * (1 - odds)).sqrt()).all())


def test_noise_can_not_bring_back_what_was_cut() -> None:
    sampling, logits = Sampling(1.0, top_k=1), torch.tensor([[0.0, 5.0, 1.0]])
    for extreme in (TINY, 100.0):
        noise = torch.tensor([[extreme, 1.0, extreme]])
        assert sampling.choose(logits, noise).item() == 1
    noise = torch.zeros(4)
    noise.exponential_ = lambda generator: noise  # type: ignore[method-assign,assignment] # a draw of 0
    decoding._draw_noise(noise, None)
    assert bool((noise > 0).all())


def test_what_is_drawn_lies_in_the_nucleus() -> None:
    """At every place of a text, as the whole pass sees it."""
    model, prompt, sampling = decoder("tra"), tokens(5, 4), Sampling(1.5, 6, 0.7)
    new = model.generate(prompt, 15, temperature=1.5, top_k=6, top_p=0.7, generator=seeded(0))
    with torch.no_grad():
        seen = model(torch.cat([prompt, new], 1))[:, 3:-1]
    assert len({tuple(row) for row in new.tolist()}) > 1
    for row, scores in zip(new.tolist(), seen.tolist(), strict=True):
        for token, at in zip(row, scores, strict=True):
            assert token in kept_by_hand(at, sampling)


def test_a_wide_head_says_what_has_a_symbol() -> None:
    model, prompt = decoder("tra"), tokens(4, 3) % 5
    assert int(model.generate(prompt, 30, temperature=5.0, generator=seeded(0)).max()) >= 5
    for temperature in (0.0, 5.0):
        said = model.generate(prompt, 30, temperature=temperature, generator=seeded(0), vocabulary=5)
        assert int(said.max()) < 5


def first_of(row: list[int], stops: set[int]) -> int:
    """Where a row ends, its stop token included."""
    return next((place + 1 for place, token in enumerate(row) if token in stops), len(row))


@pytest.mark.parametrize("every", [1, 4, 16])
@pytest.mark.parametrize("capacity", [None, "static"])
def test_stop_tokens(capacity: str | None, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row keeps its stop token and repeats it; when all have said one, that was the last column."""
    monkeypatch.setattr(decoding, "_stop_check_interval", lambda *_: every)
    model, prompt = decoder("tra"), tokens(4, 3, seed=4)
    free = model.generate(prompt, 30, generator=seeded(3), **SAMPLED).tolist()  # type: ignore[arg-type]
    stops = {free[0][2], free[2][5]}
    ends = [first_of(row, stops) for row in free]
    assert len(set(ends)) > 1
    assert max(ends) < 30
    stopped = model.generate(
        prompt, 30, generator=seeded(3), stop_tokens=sorted(stops), capacity=capacity, **SAMPLED  # type: ignore[arg-type]
    )  # fmt: skip
    assert stopped.shape == (4, max(ends))
    for row, plain, end in zip(stopped.tolist(), free, ends, strict=True):
        assert row == plain[:end] + [plain[end - 1]] * (max(ends) - end)


def test_what_a_prompt_says_does_not_end_it() -> None:
    model, prompt = decoder("tra"), tokens(2, 4)
    for stop in range(VOCABULARY):
        prompt[:, -1] = stop
        free = model.generate(prompt, 8)
        if not bool((free == stop).any()):
            break
    assert torch.equal(model.generate(prompt, 8, stop_tokens=[stop]), free)
    last = int(free[0, -1])
    assert model.generate(prompt[:1], 8, stop_tokens=[last]).shape[1] == first_of(free[0].tolist(), {last})


def test_streaming() -> None:
    """Column by column, as they come, and none after the end."""
    model, prompt, heard = decoder("tra"), tokens(2, 3), []
    free = model.generate(prompt, 9)
    said = model.generate(prompt, 9, stream=heard.append)
    assert torch.equal(torch.stack(heard, 1), said)
    assert torch.equal(said, free)
    heard.clear()
    ends = model.generate(prompt, 9, stop_tokens=free[:, 2].tolist(), stream=heard.append)
    assert torch.equal(torch.stack(heard, 1), ends)
    columns = continuation(model, prompt, 10**9)
    assert torch.equal(torch.stack([next(columns) for _ in range(9)], 1), free)
    assert torch.is_grad_enabled()


class Replayed:
    """What stands for a CUDA graph on a CPU: capturing leaves the device as it was, replaying leaves Python so."""

    def __init__(self, step: object, cache: StaticCache) -> None:
        self.plain, self.cache = step, cache

    def step(self, token: Tensor) -> Tensor:
        self.given, self.chosen = token, self.plain(token)  # type: ignore[operator]
        return self.chosen

    @contextmanager
    def capture(self, _graph: object) -> Iterator[None]:
        assert self.cache.lengths is not None
        before = self.cache.lengths.clone()
        yield
        self.cache.lengths.copy_(before)
        self.chosen.fill_(-1)

    def replay(self) -> None:
        length = self.cache.length
        self.chosen.copy_(self.plain(self.given))  # type: ignore[operator]
        self.cache.length = length


@pytest.mark.parametrize("sampled", [{}, SAMPLED])
def test_a_replayed_step_is_a_step(sampled: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop around a CUDA graph, without one."""
    captured, made = decoding._capture_step, []

    def capture(step: object, cache: StaticCache, token: Tensor) -> object:
        made.append(stand_in := Replayed(step, cache))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: stand_in)
        monkeypatch.setattr(torch.cuda, "graph", stand_in.capture)
        return captured(stand_in.step, cache, token)

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(decoding, "_run_on_side_stream", lambda step, token: step(token))
    monkeypatch.setattr(decoding, "_capture_step", capture)
    model, (ids, mask, _) = decoder("tra"), padded([6, 3], 6, "left")
    expected = model.generate(ids, 12, mask, generator=seeded(1), **sampled)
    cache = model.new_cache(18)
    assert isinstance(cache, StaticCache)
    columns = decoding._generate_columns(
        model, ids, 12, mask, Sampling(**sampled), seeded(1), None, VOCABULARY, cache, None, graph=True
    )
    assert torch.equal(torch.stack(list(columns), 1), expected)
    assert len(made) == 1
    assert cache.length == 6 + 11
    assert cache.lengths is not None
    assert cache.lengths.tolist() == [6 + 11, 3 + 11]


class Watch(TorchDispatchMode):
    """Notes operators that a capture could not hold: those that ask the device, or bring something from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operator, _types, given=(), options=None):  # type: ignore[no-untyped-def]
        name, inputs = str(operator), tree_leaves((given, options))
        from_host = any(isinstance(x, Tensor) and x.device.type == "cpu" for x in inputs)
        if from_host or any(word in name for word in ("_local_scalar", "item", "nonzero", "lift")):
            self.seen.append(name)
        return operator(*given, **(options or {}))


@pytest.mark.parametrize("mechanism", STATIC)
@torch.no_grad()
def test_a_step_keeps_to_the_device(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that has shapes and nothing else, with the kernels."""
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda on, **k: nullcontext() if on == "meta" else autocast(on, **k))
    with torch.device("meta"):
        model = decoder(mechanism).float()
        for block in model.layers:
            if hasattr(block.self_attn, "impl"):
                block.self_attn.impl = "triton"
        token, stops, noise = torch.zeros(2, 1, dtype=torch.long), torch.zeros(3), torch.ones(2, VOCABULARY)
    cache = model.new_cache(20)
    assert prefill(model, token.expand(-1, 5), None, cache).shape == (2, 32)
    with Watch() as watch:
        chosen = Sampling(0.5, 5, 0.9).choose(model(token, cache=cache)[:, -1], noise)
        torch.where(decoding._is_one_of(token, stops), token, chosen)
    assert watch.seen == []
    with Watch() as watch:  # it does see what it looks for
        _ = token * torch.tensor(2)
    assert "aten.mul.Tensor" in watch.seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -0.5}, "temperature must be finite and at least 0, got -0.5"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be at least 1, got 0"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"temperature": 1.0, "top_p": 1.01}, r"top_p must lie in \(0, 1\], got 1.01"),
        ({"stop_tokens": [3, 11]}, r"stop tokens must lie in 0..10, got 11"),
        ({"stop_tokens": [-1]}, r"stop tokens must lie in 0..10, got -1"),
        ({"stop_tokens": [7], "vocabulary": 5}, r"stop tokens must lie in 0..4, got 7"),
        ({"vocabulary": 12}, r"vocabulary must lie in 1..11, the model's, got 12"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ({"capacity": 9}, "a static cache of 9 tokens can't hold a prompt of 6 and 4 new tokens"),
        ({"capacity": "big"}, "capacity must be a number of tokens or 'static', got 'big'"),
        ({"graph": True}, r"graph=True needs a static cache \(capacity='static'\) on a GPU"),
        ({"graph": True, "capacity": "static"}, "graph=True needs a static cache"),
        ({"key_mask": torch.ones(2, 5, dtype=torch.bool)}, r"key_mask must be bool of shape \(2, 6\)"),
        ({"key_mask": torch.ones(2, 6)}, "key_mask must be bool"),
        ({"key_mask": torch.tensor([[True] * 6, [False] * 6])}, "at least one token, but row 1 of key_mask is all Fal"),
    ],
)
def test_bad_requests(options: dict[str, object], message: str) -> None:
    model = decoder("tra")
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(2, 6), **{"max_new_tokens": 4} | options)  # type: ignore[arg-type]


def test_bad_models_and_prompts() -> None:
    with pytest.raises(ValueError, match="cope can't use a static cache"):
        decoder("cope").generate(tokens(2, 6), 4, capacity="static")
    with pytest.raises(ValueError, match=r"must lie in 0..10, got 0..11"):  # also in a piece that comes late
        decoder("tra").generate(torch.arange(12)[None], 4, prefill_chunk=2)
    with pytest.raises(ValueError, match=r"not empty; got torch.int64 \(2, 0\)"):
        decoder("tra").generate(tokens(2, 6)[:, :0], 4)
    model = decoder("tra")
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(ValueError, match="logits are NaN"):
        model.generate(tokens(1, 2), 3)


GPU_RUNS = [{}, SAMPLED, SAMPLED | {"stop_tokens": [1, 2]}]


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_RUNS)
@pytest.mark.parametrize("mechanism", STATIC)
def test_a_graph_says_the_same(mechanism: str, options: dict[str, object]) -> None:
    """As the plain loop on the GPU, in float32, padded; and greedily as on the CPU."""
    model, (ids, mask, _) = decoder(mechanism, d_model=64).float(), padded([9, 4, 1], 9, "left")
    on_cpu = model.generate(ids, 40, mask)
    model, ids, mask = model.cuda(), ids.cuda(), mask.cuda()
    said = [
        model.generate(ids, 40, mask, generator=seeded(5, "cuda"), capacity="static", graph=graph, **options)  # type: ignore[arg-type]
        for graph in (True, True, False)
    ]
    assert torch.equal(said[0], said[1])
    assert torch.equal(said[0], said[2])
    if not options:
        assert torch.equal(said[0].cpu(), on_cpu)


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", STATIC)
def test_a_graph_in_half_precision(mechanism: str) -> None:
    """Under autocast and with bfloat16 weights: the same kernels as the plain loop, so the same text."""
    model, ids = decoder(mechanism, d_model=64).float().cuda(), tokens(2, 9).cuda()
    for half in (False, True):
        if half:
            model = model.bfloat16()
        with torch.autocast("cuda", torch.bfloat16, enabled=not half):
            said = [model.generate(ids, 40, capacity="static", graph=graph) for graph in (True, False)]
        assert torch.equal(*said)


@pytest.mark.gpu
def test_without_the_kernels_there_is_no_graph() -> None:
    """In float64 the walk is PyTorch's: it decodes plainly, and says why when a graph is asked for by name."""
    model, ids = decoder("tra").cuda(), tokens(2, 9).cuda()
    assert model.generate(ids, 20, capacity="static").shape == (2, 20)
    with pytest.raises(ValueError, match="on a GPU that the kernels can use"):
        model.generate(ids, 20, capacity="static", graph=True)


@pytest.mark.gpu
def test_a_graph_streams() -> None:
    """Columns that a listener keeps stay what they were."""
    model, ids, heard = decoder("tra", d_model=64).float().cuda(), tokens(2, 9).cuda(), []
    said = model.generate(ids, 40, capacity="static", graph=True, stream=heard.append)
    assert torch.equal(torch.stack(heard, 1), said)
    assert len(set(said.flatten().tolist())) > 1
