"""The margin in the layer: caches, padding, documents, statistics, reach, and the form for FlexAttention."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.test_cache import EXACT, decoder, padded, tokens
from tra.attention.shared.flex import flex_softmax_attention
from tra.attention.tra import ThresholdRelativeAttention
from tra.attention.tra_distance_only import DistanceOnlyAttention
from tra.attention.tra_plain_distance import PlainDistanceAttention

MARGIN = pytest.mark.parametrize("margin", [0.75, math.inf])


def layer(kind: type[Any] = ThresholdRelativeAttention, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(32, 4, 2, **options).double()


def random_input(length: int = 40) -> Tensor:
    return torch.randn(2, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def scores(attention: ThresholdRelativeAttention, x: Tensor) -> Tensor:
    """Scaled products of normalised queries and keys, `[B, H, T, T]`."""
    query, key, _ = attention.project_heads(x)
    return query @ key.repeat_interleave(2, dim=1).mT / math.sqrt(8)


@MARGIN
@pytest.mark.parametrize("capacity", [None, 29])
@torch.no_grad()
def test_decoding_in_pieces_is_the_whole(margin: float, capacity: int | None) -> None:
    model, ids = decoder("tra", margin=margin, threshold=0.25), tokens(3, 24)
    cache = model.new_cache(capacity)
    read = torch.cat([model(piece, cache=cache) for piece in ids.split([7, 1, 1, 15], dim=1)], 1)
    torch.testing.assert_close(read, model(ids), **EXACT)
    assert not torch.allclose(read, decoder("tra", threshold=0.25)(ids), rtol=1e-3)


@MARGIN
@pytest.mark.parametrize("mechanism", ["tra", "tra-plain-distance"])
@pytest.mark.parametrize("side", ["left", "scattered"])
@torch.no_grad()
def test_padding_changes_nothing(margin: float, mechanism: str, side: str) -> None:
    model = decoder(mechanism, margin=margin)
    ids, mask, prompts = padded([12, 7, 3], 12, side)
    found = model(ids, mask)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(found[row, mask[row]], model(prompt)[0], **EXACT)


@MARGIN
@pytest.mark.parametrize("mechanism", ["tra", "tra-plain-distance"])
@torch.no_grad()
def test_documents_don_t_see_each_other(margin: float, mechanism: str) -> None:
    model, parts = decoder(mechanism, margin=margin), [tokens(1, 5), tokens(1, 9, seed=1)]
    documents = torch.tensor([[0] * 5 + [1] * 9])
    alone = torch.cat([model(part) for part in parts], dim=1)
    torch.testing.assert_close(model(torch.cat(parts, dim=1), document_ids=documents), alone, **EXACT)


@torch.no_grad()
def test_plain_distance_with_an_infinite_margin_is_distance_only() -> None:
    kept, distance_only = layer(PlainDistanceAttention, margin=math.inf, threshold=3.0), layer(DistanceOnlyAttention)
    x, mask = random_input(), torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) > 0.3
    torch.testing.assert_close(kept(x), distance_only(x), **EXACT)
    torch.testing.assert_close(kept(x, mask)[mask], distance_only(x, mask)[mask], **EXACT)


@pytest.mark.parametrize("margin", [0.0, 0.75, math.inf])
@torch.no_grad()
def test_plain_distance_in_the_form_for_flex_attention(margin: float) -> None:
    attention, x = layer(PlainDistanceAttention, margin=margin, threshold=0.25), random_input(128)
    inputs = attention.prepare_inputs(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow if not compiled
        flexible = flex_softmax_attention(inputs, attention.logit_function(inputs))
    torch.testing.assert_close(flexible, attention.attend(inputs), **EXACT)
    kept = attention.attention_map(x).logits > -torch.inf
    expected = (scores(attention, x) > 0.25 - margin) & torch.ones(128, 128, dtype=torch.bool).tril()
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("kind", [ThresholdRelativeAttention, PlainDistanceAttention])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margin": -1.0}, "margin must be at least 0, got -1.0"),
        ({"margin": math.nan}, "margin must be at least 0, got nan"),
        ({"threshold": math.nan}, "threshold must be a number, got nan"),
    ],
)
def test_bad_values(kind: type[Any], change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(kind, **change)


@pytest.mark.parametrize("margin", [0.0, 0.75, math.inf])
def test_statistics_by_definition(margin: float) -> None:
    attention, x = layer(margin=margin, threshold=0.5), random_input()
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) > 0.3
    found = attention.statistics(x, mask)
    visible = torch.ones(40, 40, dtype=torch.bool).tril() & mask[:, None] & mask[..., None]  # [B, Tq, Tk]
    content = scores(attention, x).transpose(0, 1)[:, visible]  # [H, visible pairs]
    torch.testing.assert_close(found["counted"], (content > 0.5).float().mean(1))
    torch.testing.assert_close(found["kept"], (content > 0.5 - margin).float().mean(1))
    if margin == 0:
        assert torch.equal(found["kept"], found["counted"])
    elif margin == math.inf:
        assert (found["kept"] == 1).all()
        assert (found["null"] == 0).all()
    else:
        assert (found["counted"] < found["kept"]).all()
        assert (found["kept"] < 1).all()


@MARGIN
def test_counted_keys_are_those_above_the_threshold(margin: float) -> None:
    attention, x, rows = layer(margin=margin, threshold=0.25), random_input(), torch.tensor([3, 39, 17])
    found = attention.attention_map(x, rows=rows)
    causal = torch.arange(40) <= rows[:, None]
    counted = attention.counted_keys(x, found.logits, rows)
    assert torch.equal(counted, (scores(attention, x)[:, :, rows] > 0.25) & causal)
    assert (counted <= (found.logits > -torch.inf)).all()
    assert not torch.equal(counted, found.logits > -torch.inf)


def test_reach_with_a_margin_is_where_the_walk_may_stop() -> None:
    """What lies beyond weighs less than the tolerance, also where older keys stay without counting."""
    torch.manual_seed(1)
    x, rows = torch.randn(1, 200, 32).double(), torch.tensor([5, 120, 199])
    reaches = {}
    for margin in (0.0, 1.0, math.inf):
        torch.manual_seed(0)
        attention = ThresholdRelativeAttention(32, 4, gate_bias=-2.0, margin=margin).double()
        found = attention.attention_map(x, rows=rows)
        reaches[margin] = attention.reach(x, found.logits, rows)[0]
        assert reaches[margin].min() >= 1
        assert reaches[margin][:, 0].max() <= 6
        assert reaches[margin][:, 1:].max() < 120
        for head in range(4):
            for index, row in enumerate(rows.tolist()):
                beyond = found.weights[0, head, index, : row + 1 - int(reaches[margin][head, index])]
                assert float(beyond.sum()) <= 2**-53
    for margin in (1.0, math.inf):  # unread keys may all be inside the margin: some more have to be counted
        assert (reaches[margin] >= reaches[0.0]).all()
        assert (reaches[margin] > reaches[0.0]).any()


def test_reach_allows_for_unread_keys_inside_the_margin() -> None:
    """A few counted keys, then many just below the threshold: together these weigh too much to stop before them."""
    attention = ThresholdRelativeAttention(8, 1, gate_bias=-3.0, margin=4.0, tolerance=1e-3).double()
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.copy_(torch.eye(8))
        attention.gate.linear.weight.zero_()
    x = torch.zeros(1, 3000, 8, dtype=torch.float64)
    x[..., 0] = 1.0
    x[0, :-3, 0], x[0, :-3, 1] = -1e-6, 1.0  # scores just below 0 for the last query, whose own direction is 0
    rows = torch.tensor([2999])
    found = attention.attention_map(x, rows=rows)
    assert attention.counted_keys(x, found.logits, rows).sum() == 3
    reach = int(attention.reach(x, found.logits, rows))
    assert float(found.weights[..., : 3000 - reach].sum()) <= 1e-3
    assert float(found.weights[..., :-3].sum()) > 1e-3
