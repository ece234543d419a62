"""The bounded cache: what it says is what a full cache says whose queries see a window, and it never grows.

The oracle masks old keys in the whole map of every layer, without any cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import tra
from tests.attention.test_cache import EXACT, SIDE, decoder, padded, tokens
from tests.slow import slow
from tra.attention import MECHANISMS, BoundedCache
from tra.attention.shared import inputs as attention_inputs
from tra.model import run_layers
from tra.ops import api, choice, full_map, reference
from tra.ops.visible import Visible

TAKE_PAGES = ["tra", "tra-threshold-only", "rope"]
MECHANISM = pytest.mark.parametrize("mechanism", TAKE_PAGES)


BY_LAYER_AND_HEAD = pytest.mark.parametrize("windows", [[20, 50], [[20, 20, 150, 150], [90, 90, 9, 9]]])
Windows = list[int] | list[list[int]]
"""By layer, or by layer and head."""


@contextmanager
def hidden_beyond(windows: Windows, sinks: int = 0) -> Iterator[None]:
    """Hide old keys from every query of a decoder without a cache, layer by layer, in TRA's map and in rope's mask."""
    layer = -1

    def next_windows(heads: int) -> list[int]:
        nonlocal layer
        layer = (layer + 1) % len(windows)
        here = windows[layer]
        return [here] * heads if isinstance(here, int) else here

    def definition(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, *rest: object) -> Tensor:
        visible, options, _ = rest
        assert isinstance(visible, Visible)
        group = query.shape[1] // key.shape[1]
        parts = []
        for head, window in enumerate(next_windows(query.shape[1])):
            own, shared = slice(head, head + 1), slice(head // group, head // group + 1)
            near = visible._replace(first=(visible.last - window + 1).clamp(min=0))
            found = full_map.full_attention_map(query[:, own], key[:, shared], log_forget[:, own], near, options)  # type: ignore[arg-type]
            parts.append(full_map.weigh_values(found.weights, value[:, shared], None, query.dtype))
        return torch.cat(parts, dim=1)

    original = attention_inputs.visible_keys

    def visible_keys(inputs: attention_inputs.AttentionInputs, rows: Tensor) -> Tensor:
        index, each = torch.arange(inputs.key.shape[2]), torch.tensor(next_windows(inputs.query.shape[1]))
        near = (index > rows[:, None] - each[:, None, None]) | (index < sinks)
        return original(inputs, rows) & near

    def softmax(inputs: attention_inputs.AttentionInputs, dropout: float) -> Tensor:
        mask = visible_keys(inputs, torch.arange(inputs.query.shape[2]))
        return torch.nn.functional.scaled_dot_product_attention(
            inputs.query, inputs.key, inputs.value, attn_mask=mask, enable_gqa=True
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(api.IN_PYTORCH, "reference", definition)
        patch.setattr(choice, "MAX_REFERENCE_KEYS", 10**9)
        patch.setattr("tra.attention.nope.softmax_attention", softmax)
        yield


@torch.no_grad()
def windowed(model: tra.Decoder, text: Tensor, windows: Windows, sinks: int = 0) -> Tensor:
    with hidden_beyond(windows, sinks):
        return model(text)


@torch.no_grad()
def read(model: tra.Decoder, text: Tensor, cache: BoundedCache, chunks: list[int]) -> Tensor:
    assert sum(chunks) == text.shape[1]
    return torch.cat([model(piece, cache=cache) for piece in text.split(chunks, dim=1)], 1)


@MECHANISM
def test_with_room_for_everything_it_is_the_full_cache(mechanism: str) -> None:
    model, ids = decoder(mechanism), tokens(3, 40)
    for chunks in ([40], [17] + [1] * 5 + [18]):
        found = read(model, ids, BoundedCache(2, 40, chunk=1), chunks)
        with torch.no_grad():
            torch.testing.assert_close(found, model(ids), **EXACT)


@MECHANISM
@pytest.mark.parametrize("margin", [0.0, *slow(1.0, float("inf"))])
def test_a_window_hides_what_is_older(mechanism: str, margin: float) -> None:
    """Over several turns of the rings, with a window for each layer, read in chunks and token by token."""
    changes = {} if mechanism == "rope" else {"margin": margin}
    model, ids, windows = decoder(mechanism, **changes), tokens(2, 300), [30, 100]
    right = windowed(model, ids, windows)
    assert not torch.allclose(right, windowed(model, ids, [30, 101]), **EXACT)
    for chunks in ([25] * 12, [7, 20] + [1] * 120 + [25] * 6 + [3]):
        cache = BoundedCache(2, windows, chunk=25)
        torch.testing.assert_close(read(model, ids, cache, chunks), right, **EXACT)
        assert cache.memory_bytes == sum(2 * 2 * (2 * columns + 1) * 64 * 8 * 8 for columns in (1, 2))


@MECHANISM
@pytest.mark.parametrize("margin", [0.0, *slow(1.0, float("inf"))])
def test_heads_have_windows_of_their_own(mechanism: str, margin: float) -> None:
    """And memory of their own: heads whose windows fill as many pages share a ring."""
    changes = {} if mechanism == "rope" else {"margin": margin}
    model, ids = decoder(mechanism, n_kv_heads=4, **changes), tokens(2, 300)
    windows = [[100, 30, 30, 7], [20, 64, 150, 129]]
    right = windowed(model, ids, [[100, 30, 30, 30], [20, 64, 150, 150]])  # 7 fills as many pages as 30, 129 as 150
    assert not torch.allclose(right, windowed(model, ids, windows), **EXACT)
    for chunks in ([25] * 12, [7, 20] + [1] * 120 + [25] * 6 + [3]):
        cache = BoundedCache(2, windows, chunk=25)
        torch.testing.assert_close(read(model, ids, cache, chunks), right, **EXACT)
        assert [[ring.window for ring in layer.rings] for layer in cache.layers] == [[30, 100], [20, 64, 150]]
        of_heads, padding = (2 + 1 + 1 + 1) + (1 + 2 + 3 + 3), 8  # pages: of a row, and one for each head
        assert cache.memory_bytes == 2 * (2 * of_heads + padding) * 64 * 8 * 8


@MECHANISM
def test_query_heads_that_share_a_key_head_share_its_ring(mechanism: str) -> None:
    model, ids = decoder(mechanism), tokens(2, 200)
    cache = BoundedCache(2, [[5, 100, 70, 3], [40, 40, 100, 150]], chunk=20)
    right = windowed(model, ids, [[100, 100, 100, 100], [40, 40, 150, 150]])
    torch.testing.assert_close(read(model, ids, cache, [20] * 4 + [1] * 120), right, **EXACT)
    assert [len(layer.rings) for layer in cache.layers] == [1, 2]
    cache = BoundedCache(2, [[70, 70, 100, 150], [9] * 4], chunk=20)  # 100 fills as many pages as 70, and moves to 150
    right = windowed(model, ids, [[70, 70, 150, 150], [9] * 4])
    torch.testing.assert_close(read(model, ids, cache, [20] * 4 + [1] * 120), right, **EXACT)


def test_windows_that_fit_no_heads() -> None:
    model, ids = decoder("tra"), tokens(1, 9)
    for numbers in ([9, 8], [[9] * 4, [8] * 4]):
        assert BoundedCache(2, torch.tensor(numbers)).windows == BoundedCache(2, numbers).windows  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"windows by head must be one for each head, got 3 for 2 key heads"):
        read(model, ids, BoundedCache(2, [[9, 9, 9]] * 2), [9])
    with pytest.raises(ValueError, match=r"windows by head must be one for each of 4 heads, got 2"):
        read(model, ids, BoundedCache(2, [[9, 9]] * 2), [9])
    for wrong, message in (
        ([[9], []], "at least 1"),
        ([[9], ["9"]], "whole numbers"),
        ([[9, 0], [9, 9]], "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            BoundedCache(2, wrong)  # type: ignore[arg-type]


@MECHANISM
@SIDE
@BY_LAYER_AND_HEAD
def test_padding_changes_nothing(mechanism: str, side: str, windows: Windows) -> None:
    """Nor does what stands there: here NaN, which would poison whatever reads it. Rows wrap at different places."""
    model = decoder(mechanism)
    ids, mask, prompts = padded([200, 77, 3], 200, side)
    alone = [windowed(model, prompt, windows)[0] for prompt in prompts]
    embedded = model.embed_tokens(ids).masked_fill(~mask[..., None], torch.nan)
    cache, found, end = BoundedCache(2, windows, chunk=40), [], 0
    for piece in embedded.split([30, 1, 1, 40, 40, 40, 40, 8], dim=1):
        end += piece.shape[1]
        with torch.no_grad():
            found.append(model.lm_head(run_layers(piece, model.layers, model.norm, mask[:, :end], cache)))
    for row, expected in enumerate(alone):
        torch.testing.assert_close(torch.cat(found, 1)[row, mask[row]], expected, **EXACT)


@pytest.mark.parametrize("sinks", [1, 4, *slow(70)])
def test_sinks_stay(sinks: int) -> None:
    model, ids = decoder("rope"), tokens(2, 300)
    right = windowed(model, ids, [20, 33], sinks)
    assert not torch.allclose(right[:, -1], windowed(model, ids, [20, 33])[:, -1], **EXACT)
    cache = BoundedCache(2, [20, 33], chunk=30, sinks=sinks)
    torch.testing.assert_close(read(model, ids, cache, [30] * 5 + [1] * 150), right, **EXACT)


@MECHANISM
@torch.no_grad()
def test_nothing_grows(mechanism: str) -> None:
    """From token 100 to token 10,000: the same buffers, of the same shapes, and as many keys read."""
    torch.manual_seed(0)
    model = tra.Decoder(tra.DecoderConfig(11, d_model=16, n_layers=1, n_heads=1, mechanism=mechanism)).eval()
    cache, text, seen = BoundedCache(1, 48, chunk=80), tokens(1, 10_000), []
    (layer,) = cache.layers
    for piece in text.split(80, dim=1):
        model(piece, cache=cache)
        seen.append((cache.memory_bytes, *(buffer.data_ptr() for buffer in layer._buffers or ())))
    assert len(set(seen)) == 1
    assert cache.length == 10_000


@torch.no_grad()
def test_a_step_reads_no_more_late_than_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the maps that a token's layers compute, at token 130 and at token 3,000."""
    model, cache, text, read = decoder("tra"), BoundedCache(2, [20, 90], chunk=100), tokens(1, 3000), []
    original = reference.full_attention_map
    monkeypatch.setattr(
        reference, "full_attention_map", lambda *given: read.append(given[1].shape[2]) or original(*given)
    )
    for start, end in ((0, 100), (100, 129), (129, 130), *((at, at + 10) for at in range(130, 2999, 100))):
        model(text[:, start:end], cache=cache)
    early = read[4:6]
    model(text[:, -1:], cache=cache)
    assert read[-2:] == early == [128, 192]


@MECHANISM
def test_generation_is_that_of_the_window(mechanism: str) -> None:
    """Greedy, from a prompt longer than the window, padded, in float32, against the whole text read again each time."""
    model = decoder(mechanism).float()
    ids, mask, prompts = padded([90, 33], 90, "left")
    found = model.generate(ids, 100, mask, cache=BoundedCache(2, [20, 40], chunk=16))
    for row, prompt in enumerate(prompts):
        text = torch.cat([prompt, found[row : row + 1]], 1)
        said = windowed(model, text, [20, 40])[0, prompt.shape[1] - 1 : -1].argmax(-1)
        assert said.tolist() == found[row].tolist()


def test_sampling_and_stop_tokens_as_with_any_cache() -> None:
    model, prompt = decoder("tra"), tokens(3, 9)
    options = {"temperature": 1.3, "stop_tokens": [3]}
    said = [
        model.generate(prompt, 30, generator=torch.Generator().manual_seed(1), cache=cache, **options).tolist()  # type: ignore[arg-type]
        for cache in (None, BoundedCache(2, 50))
    ]
    assert said[0] == said[1]


def test_the_kernels_say_the_same() -> None:
    model, ids = decoder("tra", d_model=16, n_layers=1, n_heads=1, n_kv_heads=1).float(), tokens(1, 70)
    expected = model.generate(ids, 3, cache=BoundedCache(1, 20, chunk=40)).tolist()
    for block in model.layers:
        block.self_attn.impl = "triton"
    assert model.generate(ids, 3, cache=BoundedCache(1, 20, chunk=40)).tolist() == expected


def test_the_guard_counts_who_asks_for_more() -> None:
    """Heads that forget at once, and heads that don't; queries without older keys don't count."""
    model, ids = decoder("tra"), tokens(2, 120)
    for block in model.layers:
        torch.nn.init.zeros_(block.self_attn.gate.linear.weight)
        block.self_attn.gate.linear.bias.data.copy_(torch.tensor([-5.0, -5.0, 8.0, 8.0]))
    cache = BoundedCache(2, [80, 200], chunk=60, guard=True)
    read(model, ids, cache, [60] + [1] * 60)
    first, second = cache.unmet_windows()
    assert second == {"window": 200, "queries": 0, "unmet": [0] * 4}
    assert (first["window"], first["queries"]) == (80, 2 * 40)
    assert first["unmet"] == [0, 0, 80, 80]
    cache = BoundedCache(2, [[200, 200, 80, 80], [80] * 4], chunk=60, guard=True)
    read(model, ids, cache, [60] + [1] * 60)
    by_head = cache.unmet_windows()
    assert by_head[0] == {"window": [200, 200, 80, 80], "queries": [0, 0, 80, 80], "unmet": [0, 0, 80, 80]}
    assert by_head[1]["queries"] == [80] * 4
    begun = BoundedCache(1, [[5, 100]], guard=True).unmet_windows()
    assert begun == [{"window": [5, 100], "queries": [0, 0], "unmet": [0, 0]}]
    cache, (ids, mask, _) = BoundedCache(2, 80, chunk=60, guard=True), padded([120, 90], 120, "right")
    with torch.no_grad():
        for end in (60, *range(61, 121)):  # padding, which is read at last in the second row, doesn't count
            model(ids[:, cache.length : end], mask[:, :end], cache)
    assert [layer["queries"] for layer in cache.unmet_windows()] == [40 + 10] * 2
    assert cache.unmet_windows()[0]["unmet"] == [0, 0, 50, 50]
    with pytest.raises(ValueError, match="counts nothing: make it with guard=True"):
        BoundedCache(2, 80).unmet_windows()


def test_the_guard_can_have_a_tolerance_of_its_own() -> None:
    """The larger it is, the fewer queries count."""
    model, ids, counts = decoder("tra"), tokens(2, 120), []
    for block in model.layers:
        torch.nn.init.zeros_(block.self_attn.gate.linear.weight)
        block.self_attn.gate.linear.bias.data.copy_(torch.tensor([-1.0, 1.0, 2.0, 8.0]))
    for guard in (True, 2**-53, 1e-3, 0.5):
        cache = BoundedCache(2, 30, chunk=20, guard=guard)
        read(model, ids, cache, [20] * 6)
        counts.append([sum(layer["unmet"]) for layer in cache.unmet_windows()])
    assert counts[0] == counts[1]  # the early stop's in float64
    assert counts[1] > counts[2] > counts[3]
    for guard in (0.0, -1.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="guard must be a weight above 0 and below 1, or True or False, got"):
            BoundedCache(2, 30, guard=guard)


@MECHANISM
@BY_LAYER_AND_HEAD
@torch.no_grad()
def test_rows_can_be_chosen(mechanism: str, windows: Windows) -> None:
    """As beams are: a cache of the chosen rows goes on like one that has read only these, padding included."""
    model, (ids, mask, _) = decoder(mechanism), padded([90, 40, 3], 90, "left")
    order, step = torch.tensor([1, 1, 0, 2]), tokens(4, 1)
    cache, expected = BoundedCache(2, windows, chunk=100), BoundedCache(2, windows, chunk=100)
    cache.select_rows(order)  # of an empty one, nothing
    model(ids, mask, cache)
    model(ids[order], mask[order], expected)
    cache.select_rows(order)
    assert cache.memory_bytes == expected.memory_bytes
    for _ in range(3):
        torch.testing.assert_close(model(step, cache=cache), model(step, cache=expected), **EXACT)


@torch.no_grad()
def test_a_step_has_one_shape() -> None:
    """Whatever the length: what a CUDA graph needs. Nor does the number of keys read grow."""
    model, ids, seen = decoder("tra"), tokens(2, 90), set()
    cache = BoundedCache(2, 20, chunk=1)
    for layer in cache.layers:
        add = layer.add

        def record(*given: Tensor, add: object = add) -> object:
            view = add(*given)  # type: ignore[operator]
            keys = view.pages.keys
            seen.add((keys.key.shape, keys.key.data_ptr(), keys.table.data_ptr(), keys.window))
            return view

        layer.add = record  # type: ignore[method-assign,assignment]
    for token in ids.split(1, dim=1):
        model(token, cache=cache)
    assert len(seen) == 2
    assert cache.lengths is not None
    assert cache.lengths.tolist() == [90, 90]


def test_who_can_use_one() -> None:
    for mechanism in set(MECHANISMS) - set(TAKE_PAGES):
        assert not MECHANISMS[mechanism].takes_pages
        for use in (
            lambda m: m(tokens(1, 3), cache=BoundedCache(2, 9)),
            lambda m: m.generate(tokens(1, 3), 2, cache=BoundedCache(2, 9)),
        ):
            with pytest.raises(ValueError, match="can't use keys in pages: bounded caches"), torch.no_grad():
                use(decoder(mechanism))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windows": 0}, "windows must be at least 1, got 0"),
        ({"windows": [3, -1]}, "windows must be at least 1, got -1"),
        ({"windows": [3]}, "windows must be one number or one for each of 2 layers, got 1"),
        ({"windows": 2.5}, "windows must be whole numbers, got 2.5"),
        ({"windows": [3, 4.0]}, r"windows must be whole numbers, got \[3, 4.0\]"),
        ({"windows": "256"}, "windows must be whole numbers, got '256'"),
        ({"windows": 3, "chunk": 0}, "chunk must be at least 1, got 0"),
        ({"windows": 3, "sinks": -1}, "sinks must be at least 0, got -1"),
    ],
)
def test_bad_ones(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoundedCache(2, **options)  # type: ignore[arg-type]


@torch.no_grad()
def test_what_is_refused() -> None:
    model, ids = decoder("tra"), tokens(2, 200)
    cache = BoundedCache(2, 60, chunk=5)
    assert cache.chunk == 5
    model(ids[:, :60], cache=cache)  # nothing is written over yet
    with pytest.raises(ValueError, match="takes at most 5 tokens at a time, got 6: read the prompt in chunks"):
        model(ids[:, :6], cache=cache)
    with pytest.raises(ValueError, match="takes at most 5 tokens at a time, got 10"):
        model.generate(ids, 3, cache=BoundedCache(2, 60, chunk=5), prefill_chunk=10)
    with pytest.raises(ValueError, match="cache must be empty, got one with 60 tokens"):
        model.generate(ids, 3, cache=cache)
    with pytest.raises(ValueError, match=r"give either cache or capacity, got both \(capacity='static'\)"):
        model.generate(ids, 3, cache=BoundedCache(2, 60), capacity="static")
    with pytest.raises(ValueError, match="the cache has 3 layers, the model 2"):
        model.generate(ids, 3, cache=BoundedCache(3, 60))
    with pytest.raises(ValueError, match="TRA has no use for attention sinks"):
        model(ids, cache=BoundedCache(2, 200, sinks=4))
    with pytest.raises(ValueError, match="a window's guard is for TRA"):
        decoder("rope")(ids, cache=BoundedCache(2, 200, guard=True))
    with pytest.raises(ValueError, match="needs the bound on scores that qk_norm=True gives"):
        decoder("tra", qk_norm=False)(ids, cache=BoundedCache(2, 200, guard=True))
    with pytest.raises(ValueError, match="call eval"):
        decoder("tra", dropout=0.1).train()(ids, cache=BoundedCache(2, 200))
    with pytest.raises(ValueError, match=r"the cache holds torch.float64, got torch.float32"):
        model.float()(ids[:, :1], cache=cache)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="no_grad"):
        model(ids, cache=BoundedCache(2, 200))


@pytest.mark.gpu
@MECHANISM
@BY_LAYER_AND_HEAD
def test_a_graph_says_the_same(mechanism: str, windows: Windows) -> None:
    """As the plain loop on the GPU and greedily as on the CPU, in float32, over several turns of the rings."""
    model, (ids, mask, _) = decoder(mechanism, d_model=64).float(), padded([90, 40, 1], 90, "left")
    on_cpu = model.generate(ids, 200, mask, cache=BoundedCache(2, windows, chunk=64))
    model, ids, mask = model.cuda(), ids.cuda(), mask.cuda()
    said = [
        model.generate(
            ids, 200, mask, cache=BoundedCache(2, windows, chunk=64, guard=mechanism != "rope"), graph=graph
        ).cpu()
        for graph in (True, False)
    ]
    assert torch.equal(*said)
    assert torch.equal(said[0], on_cpu)
