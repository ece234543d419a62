"""Bad input gets a ValueError of one clear line."""

from __future__ import annotations

import pytest
import torch

import tra
from tests.ops.compare import exact_inputs

B, H, T, D = 2, 4, 10, 16


def good() -> dict[str, object]:
    query, key, value, log_forget = (x.detach() for x in exact_inputs(0, heads=H, n_queries=T, width=D))
    return {"query": query, "key": key, "value": value, "log_forget": log_forget}


CASES = {
    "query rank": ({"query": torch.zeros(T, D)}, r"query must be \[B, H, Tq, D\]"),
    "key rank": ({"key": torch.zeros(B, T, D)}, r"key must be \[B, Hkv, Tk, D\]"),
    "value rank": ({"value": torch.zeros(B, T, D)}, r"value must be \[B, Hkv, Tk, Dv\]"),
    "log_forget rank": ({"log_forget": torch.zeros(B, H, T, 1)}, r"log_forget must be \[B, H, Tq\]"),
    "batch": ({"key": torch.zeros(3, H, T, D)}, "share query's batch and width"),
    "width": ({"key": torch.zeros(B, H, T, 8)}, "share query's batch and width"),
    "value length": ({"value": torch.zeros(B, H, 9, D)}, "value must match key"),
    "heads": ({"key": torch.zeros(B, 3, T, D), "value": torch.zeros(B, 3, T, D)}, "multiple of key heads, got 4 and 3"),
    "more queries": ({"key": torch.zeros(B, H, 9, D), "value": torch.zeros(B, H, 9, D)}, "Tq = 10, Tk = 9"),
    "log_forget shape": ({"log_forget": torch.zeros(B, H, 9)}, r"got \(2, 4, 9\), expected \(2, 4, 10\)"),
    "positive gate": ({"log_forget": torch.full((B, H, T), 0.5)}, "at most 0"),
    "positive gate beside a NaN": (
        {"log_forget": torch.tensor([torch.nan, 0.5] * 40).view(B, H, T)},
        "at most 0 .*, got 0.5",
    ),
    "no width": ({"query": torch.zeros(B, H, T, 0)}, "query is empty"),
    "no dimensions": ({"query": torch.tensor(1.0)}, "query must be"),
    "a list": ({"key_lengths": [3, 4]}, "key_lengths must be a tensor, got a list"),
    "infinite gate": ({"log_forget": torch.full((B, H, T), -torch.inf)}, "finite"),
    "gate dtype": ({"log_forget": torch.zeros(B, H, T, dtype=torch.float64)}, "log_forget must be torch.float32"),
    "key dtype": ({"key": torch.zeros(B, H, T, D, dtype=torch.float16)}, "key must have query's dtype"),
    "integers": ({"query": torch.zeros(B, H, T, D, dtype=torch.int64)}, "floating-point"),
    "device": ({"value": torch.zeros(B, H, T, D, device="meta")}, "one device"),
    "empty": ({"query": torch.zeros(B, H, 0, D), "log_forget": torch.zeros(B, H, 0)}, "query is empty"),
    "no keys": ({"key": torch.zeros(B, H, 0, D), "value": torch.zeros(B, H, 0, D)}, "key is empty"),
    "mask dtype": ({"key_mask": torch.ones(B, T)}, "key_mask must be bool"),
    "mask shape": ({"key_mask": torch.ones(B, 9, dtype=torch.bool)}, r"shape \(2, 10\)"),
    "lengths shape": ({"key_lengths": torch.ones(3, dtype=torch.int32)}, r"key_lengths must be int32 of shape \(2,\)"),
    "length beyond": ({"key_lengths": torch.tensor([10, 11], dtype=torch.int32)}, r"in 0..10 \(Tk\), got 10..11"),
    "length negative": ({"key_lengths": torch.tensor([-1, 3], dtype=torch.int32)}, "got -1..3"),
    "scale": ({"scale": float("nan")}, "scale must be finite"),
    "threshold": ({"threshold": float("nan")}, "threshold must be a number"),
    "bound": ({"score_bound": -1.0}, "score_bound"),
    "dropout": ({"dropout": 1.0}, r"dropout must lie in \[0, 1\)"),
    "tolerance": ({"tolerance": -0.1}, r"tolerance must lie in \[0, 1\)"),
    "impl": ({"impl": "cuda"}, "unknown impl 'cuda', expected one of auto, reference"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str) -> None:
    change, message = CASES[name]
    with pytest.raises(ValueError, match=message) as caught:
        tra.threshold_relative_attention(**(good() | change))
    assert "\n" not in str(caught.value)


def test_good_input_passes() -> None:
    assert tra.threshold_relative_attention(**good()).shape == (B, H, T, D)


def test_a_named_implementation_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"triton.*not available"):
        tra.threshold_relative_attention(**good(), impl="triton")


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 5], None, "must rise from 0 to 10"),
        ([0, 7, 5, 10], None, "must rise from 0 to 10"),
        ([0, 5, 10], [0, 10], "as many sequences"),
        ([0, 5, 10], [0, 4, 10], "more queries than keys"),
        ([[0, 10]], None, "1-D int32"),
    ],
)
def test_bad_cu_seqlens(cu_q: list[int], cu_k: list[int] | None, message: str) -> None:
    packed = (torch.zeros(10, 2, 8), torch.zeros(10, 2, 8), torch.zeros(10, 2, 8), torch.zeros(10, 2))
    keys = None if cu_k is None else torch.tensor(cu_k, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        tra.threshold_relative_attention_varlen(*packed, torch.tensor(cu_q, dtype=torch.int32), keys)
