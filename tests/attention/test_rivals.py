"""TRA's rivals against independent sources: other people's packages, worked examples, loops over the definitions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import entmax
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

import tra
from tests.attention.oracles import CASES
from tra.attention import MECHANISMS, LayerCache
from tra.attention.entmax import entmax15
from tra.attention.shared.bias_columns import biased_softmax_attention, split_bits
from tra.attention.shared.flex import flex_softmax_attention
from tra.attention.shared.inputs import AttentionInputs
from tra.attention.shared.row_blocks import max_rows_at_once

LENGTH = 23
EXACT = {"rtol": 1e-9, "atol": 1e-11}
ROUNDED = {"rtol": 1e-5, "atol": 3e-5}  # where one side rounds to float32
ROWS = [17, 3, 22, 0, 9]


def built(mechanism: str, dtype: torch.dtype = torch.float64, **options: object) -> Any:
    """A layer in which no parameter is 0 or 1 throughout, so that each of them matters."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "n_heads": 4} | options
    layer = MECHANISMS[mechanism](**sizes).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def random_input(dtype: torch.dtype = torch.float64, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, LENGTH, width, generator=generator, dtype=dtype).requires_grad_()


def with_gradients(out: Tensor, x: Tensor, layer: nn.Module) -> dict[str, Tensor]:
    """The output, and gradients for the input and for every parameter."""
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out, (x, *parameters), direction)
    return {"output": out.detach()} | dict(zip(("x", *names), gradients, strict=True))


def assert_all_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], **tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def rms(error: Tensor) -> float:
    return float(error.detach().double().square().mean().sqrt())


@pytest.mark.parametrize("name", list(CASES))
def test_every_rival_equals_its_oracle(name: str) -> None:
    """Outputs, and gradients for the input and every parameter."""
    case = CASES[name]
    layer = built(case.mechanism, case.dtype, **case.options)
    x = random_input(case.dtype, layer.o_proj.out_features)
    ours, theirs = (with_gradients(out, x, layer) for out in (layer(x), case.oracle(layer, x)))
    assert_all_close(ours, theirs, **(ROUNDED if case.rounds or case.dtype == torch.float32 else EXACT))


def test_every_rival_has_an_oracle() -> None:
    assert {case.mechanism for case in CASES.values()} == set(MECHANISMS)


def published_sinusoids(length: int, width: int) -> Tensor:
    """XLM's table, rounded to float32."""
    return create_sinusoidal_embeddings(length, width, torch.empty(length, width)).double()


@pytest.mark.parametrize("width", [32, 64])
def test_sinusoidal_input_is_the_published_table(width: int) -> None:
    x = torch.randn(2, 2000, width, dtype=torch.float64)
    marked = MECHANISMS["sinusoidal"].mark_input(x, torch.arange(2000)[None])
    expected = x * math.sqrt(width) + published_sinusoids(2000, width)
    torch.testing.assert_close(marked, expected, rtol=0, atol=2**-24)


def test_sinusoidal_decoder_is_plain_attention_over_marked_embeddings() -> None:
    ids = torch.randint(11, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    outcomes = []
    for mechanism in ("sinusoidal", "nope"):
        torch.manual_seed(0)
        model = tra.Decoder(tra.DecoderConfig(11, d_model=32, n_layers=2, mechanism=mechanism)).double()
        nn.init.normal_(model.embed_tokens.weight, generator=torch.Generator().manual_seed(0))
        if mechanism == "nope":
            table = published_sinusoids(LENGTH, 32)
            model.embed_tokens.register_forward_hook(lambda _module, _ids, x, table=table: x * math.sqrt(32) + table)
        outcomes.append(with_gradients(model(ids), model.embed_tokens.weight, model))
    assert_all_close(*outcomes, **ROUNDED)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


LOGITS = {
    "random": normal(40, 17),
    "one": normal(5, 1),
    "two": normal(50, 2),
    "many": normal(5, 1000),
    "ties": normal(40, 17).round(),
    "constant": torch.full((2, 1000), 3.0, dtype=torch.float64),
    "spread": 30 * normal(20, 1000),
    "narrow": 1e-3 * normal(20, 1000),
    "causal": normal(30, 30).masked_fill(torch.ones(30, 30, dtype=torch.bool).triu(1), -torch.inf),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", list(LOGITS))
def test_entmax_equals_the_package(kind: str, dtype: torch.dtype) -> None:
    """Newton's method against sorting, which here always works in float64."""
    logits = LOGITS[kind].detach().to(dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    direction = normal(3, *logits.shape)[0]
    ours, theirs = entmax15(logits), entmax.entmax15(exact, dim=-1)
    tolerance = EXACT if dtype == torch.float64 else {}
    torch.testing.assert_close(ours, theirs.to(dtype), **tolerance)
    (ours_grad,) = torch.autograd.grad(ours, logits, direction.to(dtype))
    (theirs_grad,) = torch.autograd.grad(theirs, exact, direction)
    torch.testing.assert_close(ours_grad, theirs_grad.to(dtype), **tolerance)


def test_scalable_softmax_by_hand() -> None:
    """Four keys and s = 1/2: 4^(z / 2) = 2^z, so scores 1, 2, 0, 3 weigh 2, 4, 1, 8 fifteenths."""
    layer: Any = MECHANISMS["ssmax"](1, 1, rotary=False).double()
    nn.init.constant_(layer.strength, 0.5)
    x = torch.tensor([1.0, 2.0, 0.0, 3.0]).double()[None, :, None]
    value = torch.tensor([1.0, 10.0, 100.0, 1000.0]).double()[None, None, :, None]
    given = AttentionInputs(x, torch.ones_like(value), x[:, None], value, None, None, None)
    weights = layer.weigh(layer.logits(given, torch.tensor([3])))[0, 0, 0]
    torch.testing.assert_close(weights, torch.tensor([2.0, 4.0, 1.0, 8.0]).double() / 15)
    torch.testing.assert_close(layer.attend(given)[0, 0, 3], torch.tensor([8142 / 15]).double())


GONE = -math.inf
WORKED = {
    "tra": ((0.0, GONE, GONE, 2.0), (0.1192, 0.0, 0.0, 0.8808)),
    "tra-threshold-only": ((2.0, GONE, GONE, 3.0), (0.2689, 0.0, 0.0, 0.7311)),
    "tra-distance-only": ((-2.0, -4.0, -2.0, 2.0), (0.0176, 0.0024, 0.0176, 0.9624)),
    "tra-plain-distance": ((-2.0, GONE, GONE, 2.0), (0.0180, 0.0, 0.0, 0.9820)),
}
"""Logits and weights of the last query, whose scores are 2, -1, 0, 3, with δ = -1."""


@pytest.mark.parametrize("mechanism", list(WORKED))
def test_ablations_by_hand(mechanism: str) -> None:
    layer: Any = MECHANISMS[mechanism](1, 1, qk_norm=False).double()
    if hasattr(layer, "gate"):
        nn.init.zeros_(layer.gate.linear.weight)
        nn.init.constant_(layer.gate.linear.bias, -math.log(math.e - 1))  # log σ of it is -1
    x = torch.tensor([2.0, -1.0, 0.0, 3.0]).double()[None, :, None]
    value = torch.tensor([1.0, 10.0, 100.0, 1000.0]).double()[None, None, :, None]
    given = AttentionInputs(x, torch.ones_like(value), x[:, None], value, None, None, None)
    logits, weights = (torch.tensor(numbers).double() for numbers in WORKED[mechanism])
    found = layer.logits(given, torch.tensor([3]))
    torch.testing.assert_close(found[0, 0, 0], logits)
    torch.testing.assert_close(layer.weigh(found)[0, 0, 0], weights, rtol=0, atol=5e-5)
    torch.testing.assert_close(layer.attend(given)[0, 0, 3], logits.softmax(-1) @ value[0, 0])


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name != "lstm"])
def test_the_map_is_what_the_layer_does(mechanism: str, rows: list[int] | None) -> None:
    layer, x = built(mechanism, n_kv_heads=2), random_input().detach()
    weights = layer.attention_map(x, rows=None if rows is None else torch.tensor(rows)).weights
    given = layer.prepare_inputs(x)
    value = given.value
    if mechanism == "differential":  # two heads' values side by side
        value = torch.cat([value[:, ::2], value[:, 1::2]], dim=-1)
    read = weights @ value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    if mechanism == "differential":
        read = layer.norm(read) * (1 - layer.initial)
    expected = layer.attend(given)[:, :, list(range(LENGTH)) if rows is None else rows]
    torch.testing.assert_close(read, expected, **EXACT)


@pytest.mark.parametrize("mechanism", ["alibi", "forgetting"])
def test_nothing_is_taken_off_the_own_key(mechanism: str) -> None:
    """The map's logits are the published ones, not just the same up to a constant per row, which softmax drops."""
    found = built(mechanism).attention_map(random_input())
    own, content = (x.diagonal(dim1=-2, dim2=-1) for x in (found.logits, found.content))
    torch.testing.assert_close(own, content, **EXACT)
    assert (found.logits < found.content)[..., 1:, 0].all()


def test_an_lstm_has_no_map() -> None:
    with pytest.raises(ValueError, match="LongShortTermMemory has no attention map"):
        built("lstm").attention_map(random_input())


@pytest.mark.parametrize("mechanism", ["cope", "stickbreaking", "entmax", "tra-plain-distance", "selective"])
def test_blocks_of_rows_change_nothing(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long input is read a few rows at a time; here 5 of 23, so that the last block is shorter."""
    layer, x, rows = built(mechanism), random_input(), torch.tensor(ROWS)
    whole, whole_map = with_gradients(layer(x), x, layer), layer.attention_map(x, rows=rows)
    monkeypatch.setattr("tra.attention.shared.row_blocks.MAX_MAP_ENTRIES", {"cpu": 2 * 4 * LENGTH * 5 + 7})
    assert max_rows_at_once(layer.prepare_inputs(x)) == 5
    assert_all_close(with_gradients(layer(x), x, layer), whole, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), whole["output"], **EXACT)
    for blocked, at_once in zip(layer.attention_map(x, rows=rows), whole_map, strict=True):
        torch.testing.assert_close(blocked, at_once, **EXACT)


def biased(kind: str, dtype: torch.dtype) -> tuple[AttentionInputs, Tensor | None, Tensor]:
    """Queries, keys and values in `dtype`, and factors of a large bias in float32."""
    generator = torch.Generator().manual_seed(0)
    n_keys, n_queries = (300, 300) if kind == "forgetting" else (5000, 12)
    sizes = {"query": n_queries, "key": n_keys, "value": n_keys}
    tensors = {name: torch.randn(1, 8, n, 16, generator=generator).to(dtype) for name, n in sizes.items()}
    given = AttentionInputs(**tensors, x=tensors["query"], key_mask=None, document_ids=None, cache=None)
    place = torch.arange(n_keys, dtype=torch.float32)[None, None]
    if kind == "forgetting":
        gates = F.logsigmoid(torch.randn(1, 8, n_keys, generator=generator) + 2)
        gates[..., :100] *= 150  # all is forgotten at first, then little, on top of a sum of thousands
        return given, None, -gates.cumsum(-1)
    if kind == "alibi":
        return given, 2.0 ** -torch.arange(1, 9)[None, :, None], place
    return given, F.logsigmoid(torch.randn(1, 8, n_queries, generator=generator)), -place


def dense(given: AttentionInputs, of_query: Tensor | None, of_key: Tensor) -> Tensor:
    """What one would write without thinking of precision: S and P rounded to the dtype, the bias as it is."""
    dtype, wide = given.query.dtype, of_key.dtype
    query, key, value = (y.to(wide) for y in (given.query, given.key, given.value))
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).to(dtype).to(wide)
    bias = of_key[..., None, :] * (1 if of_query is None else of_query[..., None])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + given.past)
    weights = (scores + bias).masked_fill(future, -torch.inf).softmax(-1)
    return (weights.to(dtype).to(wide) @ value).to(dtype)


def widened(given: AttentionInputs) -> AttentionInputs:
    return given._replace(query=given.query.double(), key=given.key.double(), value=given.value.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["forgetting", "alibi", "distance"])
def test_bias_as_columns_is_exact_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    """Error at most twice that of adding a bias of some thousands in float32, both against float64."""
    given, of_query, of_key = biased(kind, dtype)
    bias = of_key if of_query is None else of_query[..., None] * of_key[..., None, :]
    assert 2000 < float(bias.abs().max()) < 50_000
    exact = dense(widened(given), None if of_query is None else of_query.double(), of_key.double())
    ours = biased_softmax_attention(given, of_query, of_key, 0.0)
    assert ours.dtype == dtype
    one_rounding = torch.finfo(torch.float32).eps * rms(given.value)
    assert rms(ours - exact) <= max(2 * rms(dense(given, of_query, of_key) - exact), one_rounding)


def test_far_places_cost_no_precision() -> None:
    """What counts near the last query is distance, not the place of both."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 16, generator=generator) for n in (4, 40_000, 40_000))
    given = AttentionInputs(query, query, key, value, None, None, None)
    of_query, of_key = F.logsigmoid(torch.randn(1, 2, 4, generator=generator)), -torch.arange(40_000.0)[None, None]
    exact = dense(widened(given), of_query.double(), of_key.double())
    by_distance = dense(given, of_query, of_key - of_key[..., -1:])
    assert rms(biased_softmax_attention(given, of_query, of_key) - exact) <= 2 * rms(by_distance - exact)


@pytest.mark.slow
def test_pieces_survive_a_compiler() -> None:
    """Which may leave out a cast to bfloat16 and back."""
    x = 1e3 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for pieces in (split_bits(x), torch.compile(split_bits)(x)):
        assert torch.equal(sum(pieces), x)
        for piece in pieces:
            assert torch.equal(piece.to(torch.bfloat16).float(), piece)


def gate_errors(mechanism: str, dtype: torch.dtype) -> tuple[float, float]:
    """Errors of the gradient that reaches x through the gate, relative to it: the layer's, and plain PyTorch's."""
    torch.manual_seed(0)
    layer: Any = MECHANISMS[mechanism](64, 4)  # gates as at the start of training
    x, generator = torch.randn(2, 128, 64), torch.Generator().manual_seed(0)
    query, key, value, direction = (torch.randn(2, 4, 128, 16, generator=generator).to(dtype) for _ in range(4))
    given = AttentionInputs(x, query, key, value, None, None, None)

    def plainly(given: AttentionInputs) -> Tensor:
        weight, bias = (parameter.to(given.x.dtype) for parameter in (layer.gate.linear.weight, layer.gate.linear.bias))
        gates = F.logsigmoid(given.x @ weight.T + bias).mT
        place = torch.arange(128, dtype=gates.dtype)[None, None]
        return dense(given, None, -gates.cumsum(-1)) if mechanism == "forgetting" else dense(given, gates, -place)

    def gradient(attend: Callable[[AttentionInputs], Tensor], given: AttentionInputs) -> Tensor:
        leaf = given.x.detach().requires_grad_()
        out = attend(given._replace(x=leaf))
        return torch.autograd.grad(out, leaf, direction.to(out.dtype))[0]

    exact = gradient(plainly, widened(given)._replace(x=x.double()))
    ours, theirs = (rms(gradient(attend, given) - exact) / rms(exact) for attend in (layer.attend, plainly))
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mechanism", ["forgetting", "tra-distance-only"])
def test_gradients_of_gates(mechanism: str, dtype: torch.dtype) -> None:
    """By the same rule as outputs. Through columns they would be off by 4 % and 19 % in bfloat16, not by 0.2 %."""
    ours, theirs = gate_errors(mechanism, dtype)
    assert ours <= 2 * theirs


@pytest.mark.parametrize("mechanism", ["forgetting", "tra-distance-only", "tra-plain-distance"])
@torch.no_grad()
def test_the_form_for_flex_attention(mechanism: str) -> None:
    """Outputs alone: FlexAttention has no backward pass on a CPU."""
    layer = built(mechanism, n_kv_heads=2)
    x = torch.randn(2, 128, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    given = layer.prepare_inputs(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow if not compiled
        flexible = flex_softmax_attention(given, layer.logit_function(given))
    assert (layer.attention_map(x).weights == 0).all(-1).any() == (mechanism == "tra-plain-distance")
    torch.testing.assert_close(flexible, layer.attend(given), **EXACT)


@pytest.mark.parametrize("mechanism", ["forgetting", "tra-distance-only"])
def test_with_and_without_gradients(mechanism: str) -> None:
    """Columns where none are needed, blocks of rows where they are."""
    layer, x = built(mechanism, n_kv_heads=2), random_input()
    with torch.no_grad():
        in_columns = layer(x)
    torch.testing.assert_close(in_columns, layer(x).detach(), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_half_precision_holds_far_places(dtype: torch.dtype) -> None:
    layer = built("alibi", d_model=8, n_heads=2).to(dtype)
    query, key, value = (torch.randn(1, 2, n, 4).to(dtype) for n in (2, 131_072, 131_072))
    assert torch.isfinite(layer.attend(AttentionInputs(query, query, key, value, None, None, None))).all()


@pytest.mark.parametrize("mechanism", ["tra", "tra-threshold-only", "tra-plain-distance"])
def test_a_nan_shows(mechanism: str) -> None:
    layer, x = built(mechanism), random_input().detach()
    given = layer.prepare_inputs(x)
    query = given.query.clone()
    query[0, 1, 5] = torch.nan
    out = layer.attend(given._replace(query=query))
    assert out[0, 1, 5].isnan().all()
    assert not out[0, 0].isnan().any()


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name != "lstm"])
@torch.no_grad()
def test_dropout_doesn_t_ask_for_gradients(mechanism: str) -> None:
    layer, x = built(mechanism, dropout=0.5).train(), random_input()
    assert not torch.equal(layer(x), layer(x))


def test_a_prompt_in_blocks_forgets_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen model outside of no_grad takes the path for training, here in several blocks, with a cache."""
    layer, x = built("forgetting").requires_grad_(False), random_input().detach()
    expected = layer(x)
    monkeypatch.setattr("tra.attention.shared.row_blocks.MAX_MAP_ENTRIES", {"cpu": 2 * 4 * LENGTH * 5})
    cache = LayerCache()
    pieces = [layer(part, cache=cache) for part in x.split([15, 8], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, **EXACT)


def test_both_halves_of_a_differential_head_drop_the_same_weights() -> None:
    layer, x = built("differential", dropout=0.5), random_input()
    given = layer.prepare_inputs(x)
    alike = given._replace(value=given.value[:, [0, 0, 2, 2]])
    read = layer.attend(alike) / layer.norm.weight
    torch.testing.assert_close(read[..., :8], read[..., 8:], **EXACT)


@pytest.mark.parametrize("size", ["mini", "medium"])
def test_parameters_within_one_percent_of_rope(size: str) -> None:
    """Gates aside, which are what some mechanisms add."""

    def count(mechanism: str) -> int:
        with torch.device("meta"):
            model = tra.Decoder(getattr(tra.DecoderConfig, size)(vocab_size=256, mechanism=mechanism))
        return sum(p.numel() for name, p in model.named_parameters() if "gate" not in name)

    expected = count("rope")
    for mechanism in MECHANISMS:
        assert abs(count(mechanism) / expected - 1) < 0.01, mechanism
