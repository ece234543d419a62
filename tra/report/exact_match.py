"""Draw exact match by test set as bars, mechanisms side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tra.report import style
from tra.report.names import SPLIT_WORDS, name_of
from tra.runs import exact_digits


def draw_exact_match(
    results: Mapping[str, Sequence[Mapping[str, Any]]],
    path: Path,
    title: str = "",
    marks: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Draw each variant's rows of eval.jsonl with 95 % intervals, and a line before test sets longer than the first.

    All variants have the same splits in the same order. `marks` are for variants that broke down in training.
    """
    shown = next(iter(results.values()))
    lengths = [row["longest"] for row in shown]
    width = 0.8 / len(results)
    styles = style.bar_styles(results)
    with style.panels(path, 1, 1, (max(1.2, 0.36 * len(results)) * len(shown) + 1.5, 3.2)) as ((axes,),):
        for number, (variant, rows) in enumerate(results.items()):
            places = [index + (number - (len(results) - 1) / 2) * width for index in range(len(rows))]
            heights = [row["exact"] for row in rows]
            errors = np.maximum(0, [[row["exact"] - row["low"], row["high"] - row["exact"]] for row in rows]).T
            axes.bar(places, heights, width * 0.95, label=name_of(variant) + marks.get(variant, ""), **styles[variant])
            axes.errorbar(places, heights, yerr=errors, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
            for place, row in zip(places, rows, strict=True):
                axes.text(place, row["high"] + 0.015, _bar_text(row), ha="center", fontsize=7)
        axes.set_xticks(range(len(shown)), [_test_set(row) for row in shown])
        axes.set_xlabel("test set, and its length in symbols")
        axes.set_ylabel("sequences without an error")
        axes.set_ylim(0, 1.12)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        longer = next((index for index, length in enumerate(lengths) if length > lengths[0]), None)
        if longer:
            axes.axvline(longer - 0.5, color="black", linewidth=0.8, linestyle=":")
            axes.text(longer - 0.45, 1.1, "longer than trained →", fontsize=8, va="bottom")
        if marks:
            style.note_below(axes, style.BROKE_DOWN, lines=3)
        axes.set_title(title, fontsize=10, loc="left", pad=28)
        axes.legend(ncols=len(results), loc="lower left", bbox_to_anchor=(0.0, 1.02))


def _test_set(row: Mapping[str, Any]) -> str:
    """Return what stands below the bars of a test set: its name, its length, and what it asks."""
    return f"{row['split']}\n{row['longest']:,}\n{SPLIT_WORDS.get(row['split'], '')}".rstrip()


def _bar_text(row: Mapping[str, Any]) -> str:
    """Return exact match as the text over a narrow bar: `.824`, with more digits if three would read 0 or 1."""
    exact = row["exact"]
    if exact in (0, 1):
        return f"{exact:.0f}"
    is_near_an_end = f"{exact:.3f}" in ("0.000", "1.000")
    return f"{exact:.{exact_digits(row.get('examples', 0)) if is_near_an_end else 3}f}".lstrip("0")
