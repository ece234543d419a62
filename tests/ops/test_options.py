"""Options are checked and completed in one place."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import tra
from tra.ops.options import AttentionOptions


def test_defaults() -> None:
    for dtype, tolerance in ((torch.bfloat16, 2.0**-24), (torch.float32, 2.0**-24), (torch.float64, 2.0**-53)):
        assert AttentionOptions.resolve(64, dtype) == AttentionOptions(0.125, 0.0, None, 0.0, tolerance)
    given = {"scale": -0.5, "threshold": 0.1, "score_bound": 3.0, "dropout": 0.2, "tolerance": 0.0, "margin": 0.5}
    assert dataclasses.asdict(AttentionOptions.resolve(64, torch.float32, **given)) == given


def test_the_public_functions_take_every_option() -> None:
    fields = {field.name for field in dataclasses.fields(AttentionOptions)}
    for function in (tra.threshold_relative_attention, tra.threshold_relative_attention_varlen):
        assert fields <= set(inspect.signature(function).parameters)


def test_they_are_checked_and_do_not_change() -> None:
    with pytest.raises(ValueError, match="tolerance must lie in"):
        AttentionOptions(1.0, tolerance=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionOptions(1.0).scale = 2.0  # type: ignore[misc]
