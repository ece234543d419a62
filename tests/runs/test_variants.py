"""Variants: a mechanism with its threshold and margin, as text and back."""

from __future__ import annotations

import math

import pytest

from tra.config import finite_dict
from tra.runs import mechanism_of, settings_of, variant_of


@pytest.mark.parametrize(
    ("threshold", "margin", "expected"),
    [
        (0.0, 0.0, "tra"),
        (-0.0, 0, "tra"),
        (0.0, 2.0, "tra, margin 2"),
        (-1.0, 0.0, "tra, threshold -1"),
        (0.25, math.inf, "tra, threshold 0.25, margin inf"),
        (1e-7, 2.0000001, "tra, threshold 1e-07, margin 2.0000001"),
        (-123456789.0, 1e18, "tra, threshold -123456789.0, margin 1e+18"),
    ],
)
def test_a_variant_says_what_is_not_0(threshold: float, margin: float, expected: str) -> None:
    model = {"mechanism": "tra", "threshold": threshold, "margin": margin}
    assert variant_of(model) == variant_of(finite_dict(model.items())) == expected  # also as a file has it
    assert mechanism_of(expected) == "tra"
    assert settings_of(expected) == (threshold, margin)


def test_configs_of_former_versions_are_plain() -> None:
    assert variant_of({"mechanism": "tra"}) == "tra"
    assert settings_of("tra") == (0.0, 0.0)


@pytest.mark.parametrize("name", ["", "x, y", "a, margin wide", "b, margin 1.2.3", "c\n, threshold", "d, margin 2, e"])
def test_any_name_of_a_mechanism_is_taken_as_it_is(name: str) -> None:
    assert mechanism_of(name) == name
    variant = variant_of({"mechanism": name, "margin": 2.0})
    assert (mechanism_of(variant), settings_of(variant)) == (name, (0.0, 2.0))
