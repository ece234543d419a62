"""Give all figures one colour-blind safe style, in which a mechanism always has the same colour, marker and line.

A second variant of a mechanism in the same figure, such as TRA with a margin, has its own style.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

from tra.report.curves import Curve
from tra.report.names import NAMES, colours_of, name_of, table_order
from tra.runs import mechanism_of, write_atomically

SETTINGS: Any = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.bbox": "tight",
}

BROKE_DOWN = "† broke down in training: the loss ended far above its best"
"""Footnote of a figure that has such runs."""

MAX_LINES = 6
"""Mechanisms in one panel, beyond which there are several panels."""

# In grey print, markers and lines tell mechanisms apart: neighbours in tables differ in both.
_MARKERS = "osD^vP*X<>phd8Hs"
_LINES: tuple[Any, ...] = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_HATCHES = ("", "///", "...", "xx", "\\\\\\", "++")
_VARIANT_HATCHES = ("||", "--", "oo")


def styled() -> Any:
    """Return a context in which to draw a figure."""
    return plt.rc_context(SETTINGS)


@contextmanager
def panels(
    path: Path, rows: int, columns: int, size: tuple[float, float], tight: bool = False, **options: Any
) -> Iterator[Any]:
    """Give the panels `[rows, columns]` of a figure to draw on, and write it afterwards."""
    with styled():
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
        yield axes
        if tight:
            figure.tight_layout()
        save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write and close a figure. A PNG gets a palette of 256 colours, which is a third of the bytes."""
    kind = path.suffix.lower()[1:]
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    if kind == "png":
        whole = Image.open(drawn).convert("RGB")
        drawn = io.BytesIO()
        whole.quantize(256, dither=Image.Dither.NONE).save(
            drawn, format="png", optimize=True, dpi=whole.info.get("dpi")
        )
    write_atomically(path, drawn.getvalue())
    plt.close(figure)


def draw_curve(axes: Any, curve: Curve, opacity: float = 0.13, **line: Any) -> None:
    """Draw a line and its range."""
    (drawn,) = axes.plot(curve.x, curve.middle, **line)
    axes.fill_between(curve.x, curve.low, curve.high, color=drawn.get_color(), alpha=opacity, linewidth=0)


def note_below(axes: Any, text: str, lines: int = 2) -> None:
    """Write a footnote below a panel's axis, whose ticks have so many lines of text."""
    axes.annotate(
        text, (0, 0), (0, -18 - 12 * lines), "axes fraction", textcoords="offset points", fontsize=8, va="top"
    )


def mark_trained_length(axes: Any, trained_at: int) -> None:
    axes.axvline(trained_at, color="black", linewidth=0.8, linestyle=":")


def legend_above(axes: Any, columns: int = 1, **handles: Any) -> None:
    """Put the legend over a panel, where no line runs into it."""
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.3, ncols=columns, **handles)


def line_styles(variants: Iterable[str], marks: Mapping[str, str] = MappingProxyType({})) -> dict[str, dict[str, Any]]:
    """Return the style and label of each variant's line. Variants of one mechanism differ in every property.

    Lines that lie on top of each other all stay visible: later ones are thinner, and all but TRA's first have gaps.
    """
    variants = table_order(variants)
    colours, counts = colours_of(variants), _counts(variants)
    firsts = {_MARKERS[_number(variant) % len(_MARKERS)] for variant in variants}
    free = itertools.cycle([marker for marker in reversed(_MARKERS) if marker not in firsts] or _MARKERS)
    styles: dict[str, dict[str, Any]] = {}
    for variant in variants:
        number, count = _number(variant), counts[variant]
        is_solid = number == count == 0  # TRA's first
        styles[variant] = {
            "color": colours[variant],
            "marker": next(free) if count else _MARKERS[number % len(_MARKERS)],
            "linestyle": "-" if is_solid else _LINES[(number + count) % len(_LINES)],
            "markersize": 4,
            "linewidth": max(1.2, 2.6 - 0.15 * number - 0.6 * count),
            "zorder": 2 + 0.01 * number + 0.001 * count,
            "label": name_of(variant) + marks.get(variant, ""),
        }
    return styles


def bar_styles(variants: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each variant's bars. The paper's rivals, and variants of one mechanism, differ in pattern."""
    variants = table_order(variants)
    colours, counts = colours_of(variants), _counts(variants)
    order = ["tra", "rope", "forgetting", "cope"]
    styles = {}
    for variant in variants:
        mechanism, count = mechanism_of(variant), counts[variant]
        hatch = _HATCHES[order.index(mechanism) if mechanism in order else 4 + _number(variant) % 2]
        hatch = _VARIANT_HATCHES[(count - 1) % len(_VARIANT_HATCHES)] if count else hatch
        styles[variant] = {"color": colours[variant], "hatch": hatch, "edgecolor": "white", "linewidth": 0}
    return styles


def _counts(variants: Sequence[str]) -> dict[str, int]:
    """Return how many variants of the same mechanism come before each variant."""
    mechanisms = [mechanism_of(variant) for variant in variants]
    return {variant: mechanisms[:place].count(mechanisms[place]) for place, variant in enumerate(variants)}


def _number(variant: str) -> int:
    mechanism = mechanism_of(variant)
    return list(NAMES).index(mechanism) if mechanism in NAMES else len(NAMES)


def split_into_panels(variants: Sequence[str]) -> list[list[str]]:
    """Return the variants of each panel: all in one panel, or many in panels of four, each with TRA to compare with."""
    if len(variants) <= MAX_LINES:
        return [list(variants)]
    panels = [list(variants[first : first + 4]) for first in range(0, len(variants), 4)]
    base = [variant for variant in variants if mechanism_of(variant) == "tra"][:1]
    return [panel if not base or base[0] in panel else [*base, *panel] for panel in panels]


def length_ticks(axes: Any, lengths: Sequence[int]) -> None:
    """Make an axis logarithmic, with a tick for each measured length, and numbers as far as they have room."""
    axes.set_xscale("log")
    labels, room = [], 0.06 * math.log(max(lengths) / min(lengths))
    last = -math.inf
    for length in sorted(lengths):
        shown = math.log(length) - last >= room
        last = math.log(length) if shown else last
        labels.append("" if not shown else f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}")
    axes.set_xticks(sorted(lengths), labels)
    axes.minorticks_off()
