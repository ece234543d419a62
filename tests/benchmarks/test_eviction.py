"""The simulated caches, against a plain form by hand, and the weights over what they hold."""

from __future__ import annotations

import json
import random

import pytest
import torch

from benchmarks import eviction
from benchmarks.eviction import HeadMaps, Policy, simulate, weights_over
from tra.ops import AttentionMap, attention_map
from tra.runs import RunFolder


def plain_cache(kept: list[list[bool]], memory: int, unkept_for: int | None, newest: int) -> list[set[int]]:
    """Return the keys that each query has, by a list of keys with the query that kept each last."""
    cache: dict[int, int] = {}
    found = []
    for query in range(len(kept)):
        if len(cache) == memory:
            unkept = [
                key
                for key, last in cache.items()
                if unkept_for is not None and key <= query - newest and query - 1 - last >= unkept_for
            ]
            del cache[min(unkept or cache)]
        cache[query] = query
        for key in cache:
            if kept[query][key]:
                cache[key] = query
        found.append(set(cache))
    return found


@pytest.mark.parametrize("unkept_for", [None, 1, 3])
@pytest.mark.parametrize("share", [0.25, 0.6])
def test_against_a_plain_cache(unkept_for: int | None, share: float) -> None:
    draw, length, memory = random.Random(0), 40, 8
    kept = [[[draw.random() < share for _ in range(length)] for _ in range(length)] for _ in range(2)]
    held, early = simulate(torch.tensor(kept), memory, Policy("", unkept_for, 0.5))
    for head in range(2):
        expected = plain_cache(kept[head], memory, unkept_for, 4)
        assert [set(row.nonzero()[:, 0].tolist()) for row in held[head]] == expected
    assert bool((early > 0).all()) == (unkept_for is not None)


def maps(heads: int = 2, length: int = 24, margin: float = 0.0) -> HeadMaps:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, heads, length, 8).double()
    log_forget = torch.nn.functional.logsigmoid(torch.randn(1, heads, length).double())
    found = attention_map(query, key, log_forget, margin=margin)
    return HeadMaps(AttentionMap(*(part[0] for part in found)), log_forget[0])


@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_weights_over_a_window_are_those_of_the_whole_map_without_the_rest(margin: float) -> None:
    given = maps(margin=margin)
    torch.testing.assert_close(weights_over(given, torch.ones_like(given.found.kept)), given.found.weights)
    held, early = simulate(given.found.kept, 6, Policy("window"))
    assert early.tolist() == [0, 0]
    rest = given.found.weights * held
    expected = (rest / rest.sum(-1, keepdim=True)).nan_to_num(0.0)
    torch.testing.assert_close(weights_over(given, held), expected)
    measured = eviction.measure(given, 6, Policy("window"))
    torch.testing.assert_close(measured["shifted"], measured["dropped"])
    assert bool((measured["best"] < measured["dropped"]).all())


def test_keys_that_nobody_keeps_go_first_and_cost_nothing() -> None:
    """Every other key is never kept: without them, half the memory is enough."""
    given = maps(length=32)
    is_noise = torch.arange(32) % 2 == 1
    kept = given.found.kept & ~is_noise
    counted_right = kept.double().flip(-1).cumsum(-1).flip(-1) - kept.double()
    logits = given.found.scores + given.log_forget[..., None] * (counted_right + 1)
    weights = logits.masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num(0.0)
    given = given._replace(found=given.found._replace(kept=kept, counted=kept, weights=weights))
    window, unkept = (eviction.measure(given, 8, policy) for policy in (Policy("window"), Policy("", 1, 0.25)))
    assert bool((unkept["dropped"] < window["dropped"]).all())
    assert bool((unkept["shifted"] < window["shifted"]).all())


def test_a_trained_run() -> None:
    run = RunFolder.open("flipflop-tra")
    sequences = eviction.open_sequences(run, 0, 2, 0)
    short = sequences._replace(tokens=[row[:64] for row in sequences.tokens])
    rows = eviction.bench_eviction(run, short, (4,), (Policy("window"), Policy("unkept first", 8, 0.5)))
    assert [row["name"] for row in rows] == ["window", "unkept first"]
    assert json.loads(json.dumps(rows)) == rows
    assert len(rows[1]["shifted less than window, 95 %"]) == 3
