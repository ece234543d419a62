"""Queries, keys and values as one product, where a compiler trains: the same as three, and never past a layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tra.attention import MECHANISMS
from tra.attention.shared import base as _base
from tra.attention.shared.base import Attention

ATTENTION = [name for name, kind in MECHANISMS.items() if issubclass(kind, Attention)]


def results(layer: Attention, x: Tensor) -> list[Tensor]:
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("mechanism", ATTENTION)
def test_one_product_is_three(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = MECHANISMS[mechanism](32, 4, 2).double()
    x = torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    expected = results(layer, x)
    monkeypatch.setattr(_base, "one_product_is_best", lambda _: True)
    called = []
    monkeypatch.setattr(nn.Linear, "forward", _counting(nn.Linear.forward, called))
    found = results(layer, x)
    assert not {layer.query, layer.key, layer.value} & set(called)
    assert layer.out in called
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def _counting(forward, called):  # type: ignore[no-untyped-def]
    def counted(layer: nn.Linear, x: Tensor) -> Tensor:
        called.append(layer)
        return forward(layer, x)

    return counted


class Adapter(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 1 - super().forward(x)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_stands_in_a_projections_place_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias counts, a hook, another class."""
    monkeypatch.setattr(_base, "one_product_is_best", lambda _: True)
    torch.manual_seed(0)
    x = torch.randn(1, 6, 32)
    layer = MECHANISMS["rope"](32, 2)
    plain = layer(x)
    biased = nn.Linear(32, 32)
    biased.weight = getattr(layer, name).weight
    nn.init.ones_(biased.bias)
    for change in (
        lambda: setattr(layer, name, biased),
        lambda: getattr(layer, name).register_forward_hook(lambda _layer, _args, out: 2 * out),
        lambda: setattr(layer, name, Adapter(32, 32, bias=False)),
    ):
        change()
        changed = layer(x)
        assert not torch.allclose(changed, plain)
        plain = changed


def test_weights_of_another_kind_are_left_to_their_layer() -> None:
    """Quantised or spread over devices, say."""

    class Quantised(Tensor):
        pass

    layer = nn.Linear(4, 4, bias=False)
    assert _base.is_plain(layer)
    layer.weight = nn.Parameter(torch.ones(4, 4).as_subclass(Quantised))
    assert not _base.is_plain(layer)


def test_where_it_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = type("OnGpu", (), {"is_cuda": True})()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert _base.one_product_is_best(on_gpu)
    assert not _base.one_product_is_best(torch.zeros(1))
    with torch.no_grad():
        assert not _base.one_product_is_best(on_gpu)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    assert not _base.one_product_is_best(on_gpu)
