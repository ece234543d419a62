"""Run folders made up for tests of the page: whole, hostile and damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<b>bold</b> &amp; %{x} \"quotes\" 'and' `ticks` ${this}",
    "emoji 🧨 שלום عربى \u2028\u2029\u202e",
    "long " + "a" * 10_000,
]
LENGTHS = {"iid": 64, "sparse": 64, "4x": 256, "16x": 1024}


def make_run(
    folder: Path, mechanism: str, seed: int = 0, *, fades: float = 0.0, steps: int = 20, diagnosed: bool = True
) -> Path:
    """An evaluated flip-flop run that loses `fades` of its exact match at four times the length."""
    folder.mkdir(parents=True)
    config = {
        "task": {"name": "flipflop", "arguments": {"length": 64}},
        "model": {"mechanism": mechanism, "n_layers": 2, "n_heads": 2, "d_model": 64},
        "optim": {"lr": 0.001},
        "train": {"steps": 50 * steps, "batch_size": 64, "seed": seed},
    }
    session = {"commit": "abc", "device": "CPU", "torch": "2", "arguments": ["train", "--preset", "demo", f"x={seed}"]}
    write_json(folder / "config.json", config)
    write_json(folder / "environment.json", {"sessions": [session]})
    losses = [{"step": 50 * (n + 1), "loss": 1 / (n + 1 + seed), "exact": 1.0, "accuracy": 1.0} for n in range(steps)]
    write_lines(folder / "metrics.jsonl", losses)
    rows: list[dict[str, Any]] = []
    diagnosis: list[dict[str, Any]] = []
    for split, length in LENGTHS.items():
        exact = max(0.0, 1 - fades * math.log(length / 64, 4) - 0.001 * seed * (length > 64))
        bounds = {"low": max(0.0, exact - 0.02), "high": min(1.0, exact + 0.02)}
        rows.append({"split": split, "shortest": length, "longest": length, "examples": 500, "exact": exact, **bounds})
        mass = [[0.1 * fades * length / 64, 0.2 * fades], [None, 0.05]]
        diagnosis.append(
            {"split": split, "shortest": length, "longest": length, "negative_mass": mass, "reversed": mass}
        )
    write_lines(folder / "eval.jsonl", rows)
    if diagnosed:
        write_lines(folder / "diagnose.jsonl", diagnosis)
    return folder


def make_text_run(folder: Path, mechanism: str, *, grows: float, seed: int = 0) -> Path:
    """A language model whose loss changes by `grows` nats every time the window doubles."""
    make_run(folder, mechanism, seed, diagnosed=False)
    (folder / "eval.jsonl").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["task"] = {"name": "text", "arguments": {"data": "data/words", "window": 128}}
    write_json(folder / "config.json", config)
    rows = []
    for window in (128, 256, 512):
        loss = 3.0 + grows * math.log2(window / 128) + 0.01 * seed
        documents = [[(loss + 0.1 * (n % 5)) * 100, 100] for n in range(20)]
        perplexity = math.exp(loss)
        bounds = {"perplexity": perplexity, "low": 0.9 * perplexity, "high": 1.1 * perplexity}
        rows.append(
            {"text": "words", "window": window, "overlap": "none", "loss": loss, "by_document": documents} | bounds
        )
    write_lines(folder / "perplexity.jsonl", rows)
    return folder


def make_maps(
    folder: Path,
    *,
    layers: int = 2,
    heads: int = 2,
    size: int = 12,
    symbols: Sequence[str] = ("w", "1", "i", "0"),
    has_margin: bool = False,
) -> Path:
    """attend.npz of a run. The third query keeps nothing; head h gives its own place 1/(h + 1) of the weight.

    With a margin, the first key stays without counting.
    """
    rows = np.arange(size)
    shape = (layers, heads, size, size)
    weights, distances = np.zeros(shape, np.uint8), np.zeros(shape, np.uint16)
    for head in range(heads):
        for row in rows:
            weights[:, head, row, row] = 1 + round(63 * (1 / (head + 1)) ** 0.5)
            weights[:, head, row, :row] = 5
            distances[:, head, row, : row + 1] = np.arange(row + 1, 0, -1)
    weights[:, :, 2], distances[:, :, 2] = 0, 0
    content = np.where(weights > 0, 1.5, -0.5).astype(np.float16)
    named = np.array([symbols[place % len(symbols)] for place in rows])
    null = np.zeros(shape[:3], bool)
    null[:, :, 2] = True
    arrays = {"symbols": named, "row_symbols": named, "rows": rows, "columns": rows, "marked": np.array([4])}
    arrays |= {"layers": np.arange(layers), "heads": np.arange(heads), "weights": weights, "content": content}
    arrays |= {"distances": distances, "null": null, "mechanism": np.array("tra"), "title": np.array("flipflop, iid")}
    if has_margin:
        arrays["uncounted"] = (rows == 0) & (weights > 0)
    np.savez_compressed(folder / "attend.npz", **arrays)
    return folder


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
