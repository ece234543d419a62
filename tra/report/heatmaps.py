"""Draw the attention of runs on one sequence: a panel per layer and head, runs side by side.

White is a key that left the softmax, grey is a later key, and a small frame is a key that stays without counting as
distance. A frame around a row is a query at which an answer is due; a cross is a query that keeps no key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.colors import ListedColormap, PowerNorm, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from tra.report.head_ranking import CRITERION, top_heads
from tra.report.names import name_of
from tra.report.style import save, styled
from tra.runs import AttentionMaps, weights_of

SUFFIXES = (".png", ".svg", ".pdf")

MAX_INCHES = 18.0
"""Width and height of all panels together. Cells shrink to fit; then not every token has room on the axes."""

MIN_FONT = 4.5
"""Points of the smallest token."""

_LATER, _DROPPED, _DUE, _NULL, _UNCOUNTED = "#E4E4E4", "#FFFFFF", "#D55E00", "#000000", "#9A9A9A"
_FRAME: Any = {"linestyle": "", "marker": "s", "color": _UNCOUNTED, "fillstyle": "none"}
_WEIGHTS = ListedColormap(mpl.colormaps["YlGnBu"](np.linspace(0.12, 1, 256)))  # no weight is white
_NORM = PowerNorm(0.5, 0.0, 1.0)  # so that small weights show


def check_figure(path: Path) -> None:
    """Check that a figure can be written to this path, before work is spent on it."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a figure ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, got {path.name!r}")


class Panel(NamedTuple):
    """One layer and head of one run."""

    run: int
    layer: int
    head: int
    row: int  # in the grid
    column: int
    weights: npt.NDArray[Any]  # [R, C], NaN where a key is not seen or dropped
    uncounted: npt.NDArray[np.bool_]  # [R, C], keys that stay without counting as distance
    later: npt.NDArray[np.bool_]  # [R, C], keys that stand after the query
    due: list[int]  # rows at which an answer is due
    null: list[int]  # rows that keep no key


def panels(found: Sequence[AttentionMaps], most: int | None = None) -> list[Panel]:
    """Return the panels and their places: a row for each layer, and a column for each head of each run.

    A run with more than `most` heads in all has its top heads, in one row.
    """
    result, before = [], 0
    for run, maps in enumerate(found):
        later = maps.columns > maps.rows[:, None]
        due = np.flatnonzero(np.isin(maps.rows, maps.marked)).tolist()
        is_chosen = most is not None and len(maps.layers) * len(maps.heads) > most
        shown = top_heads(maps, most) if is_chosen and most else list(np.ndindex(len(maps.layers), len(maps.heads)))
        for place, (row, column) in enumerate(shown):
            at_row, at_column = (0, before + place) if is_chosen else (row, before + column)
            null = np.flatnonzero(maps.null[row, column]).tolist()
            weights, uncounted = weights_of(maps.weights[row, column]), maps.uncounted[row, column]
            layer, head = int(maps.layers[row]), int(maps.heads[column])
            result.append(Panel(run, layer, head, at_row, at_column, weights, uncounted, later, due, null))
        before += len(shown) if is_chosen else len(maps.heads)
    return result


def draw_attention(found: Sequence[AttentionMaps], path: Path, most: int | None = None) -> None:
    """Draw the maps of runs on the same window of the same sequence, each under its mechanism's name.

    Args:
        most: Largest number of heads of each run to draw, chosen by `top_heads`; all by default.
    """
    check_figure(path)
    first = found[0]
    for other in found[1:]:
        if any(not np.array_equal(a, b) for a, b in zip(first[:4], other[:4], strict=True)):
            raise ValueError("the runs looked at different windows: attend to the same sequence with all of them")
    drawn = panels(found, most)
    n_heads = max(len(maps.layers) * len(maps.heads) for maps in found)
    title = first.title
    if most is not None and n_heads > most:
        title += f". Of {n_heads} heads the {most} with the {CRITERION}"
    names = [name_of(maps.mechanism) for maps in found]
    n_rows, n_columns = (1 + max(getattr(panel, way) for panel in drawn) for way in ("row", "column"))
    tall, wide = drawn[0].weights.shape
    cell = min(0.11, MAX_INCHES / (n_columns * wide), MAX_INCHES / (n_rows * tall))
    cell = max(cell, min(0.3, 1.6 / max(tall, wide)))  # a short sequence is still a figure
    font = min(8.0, max(MIN_FONT, 66 * cell))
    labels = [[shown_symbol(symbol) for symbol in symbols] for symbols in (first.row_symbols, first.symbols)]
    left, bottom = (0.15 + 0.6 * font / 72 * max(map(len, side)) for side in labels)
    panel_width, panel_height = cell * wide, max(cell * tall, 0.3)
    larger = min(1.8, max(1.0, n_columns * panel_width / 8))  # so that the text around a large grid can be read
    gap, between, top, right = 0.12, 0.3, 0.6 * larger, 0.5 + 0.35 * larger
    width = left + n_columns * (panel_width + gap) + (len(found) - 1) * between + right
    handles = _legend_handles(drawn)
    legend_columns = max(1, min(len(handles), int(width / (1.4 * larger))))
    below = bottom + (0.35 + 0.2 * ((len(handles) - 1) // legend_columns)) * larger
    height = below + n_rows * (panel_height + 0.25) + top
    with styled(), mpl.rc_context({"savefig.bbox": None, "axes.grid": False}):
        figure = plt.figure(figsize=(width, height))
        for panel in drawn:
            x = left + panel.column * (panel_width + gap) + panel.run * between
            y = height - top - (panel.row + 1) * (panel_height + 0.25) + 0.05
            axes = figure.add_axes((x / width, y / height, panel_width / width, panel_height / height))
            _draw_panel(axes, panel, 72 * cell)
            axes.set_title(f"layer {panel.layer}, head {panel.head}", fontsize=min(8, 4 + 2 * panel_width), pad=2)
            last = not any((other.column, other.row) == (panel.column, panel.row + 1) for other in drawn)
            _label(axes, labels, panel, font, cell, show=(panel.column == 0, last))
        for run, name in enumerate(names):
            column = min(panel.column for panel in drawn if panel.run == run)
            x = left + column * (panel_width + gap) + run * between
            y = 1 - (top - 0.05) / height
            figure.text(x / width, y, name, fontsize=10 * larger, weight="bold", va="bottom", parse_math=False)
        y = 1 - 0.1 / height
        figure.text(left / width, y, title, fontsize=9 * larger, va="top", parse_math=False)
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(left / width, 0.05 / height),
            ncols=legend_columns,
            fontsize=8 * larger,
            borderaxespad=0,
        )
        bar = min(2.0 * larger, height - top - below - 0.2)
        place = (1 - (right - 0.1) / width, (height - top - bar - 0.2) / height, 0.1 * larger / width, bar / height)
        _colour_bar(figure, place, 8 * larger)
        save(figure, path)


def shown_symbol(symbol: str) -> str:
    """Return a token for an axis: letters that can't be seen are replaced by signs, and a long token is shortened."""
    for hidden, sign in ((" ", "␣"), ("\n", "↵"), ("\t", "⇥"), ("\r", "␍")):
        symbol = symbol.replace(hidden, sign)
    symbol = "".join(sign if sign.isprintable() else "�" for sign in symbol)
    return symbol if len(symbol) <= 12 else symbol[:11] + "…"


def _draw_panel(axes: Any, panel: Panel, points: float) -> None:
    image = _WEIGHTS(_NORM(np.nan_to_num(panel.weights)))[..., :3]
    image[np.isnan(panel.weights)] = to_rgb(_DROPPED)
    image[panel.later] = to_rgb(_LATER)
    axes.imshow(image, aspect="auto", interpolation="nearest")
    rows, columns = np.nonzero(panel.uncounted)
    axes.plot(columns, rows, **_FRAME, markersize=0.62 * points, markeredgewidth=0.09 * points)
    own = (~panel.later).sum(1) - 1  # the last key shown that a row sees
    for row in panel.due:
        frame = Rectangle((-0.5, row - 0.5), own[row] + 1, 1, fill=False, edgecolor=_DUE, linewidth=0.12 * points)
        axes.add_patch(frame)
    axes.plot(own[panel.null], panel.null, "x", color=_NULL, markersize=0.6 * points, markeredgewidth=0.1 * points)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_linewidth(0.5)


def _label(axes: Any, labels: list[list[str]], panel: Panel, font: float, cell: float, show: tuple[bool, bool]) -> None:
    """Write tokens on the axes, as many as there is room for."""
    step = max(1, int(np.ceil(MIN_FONT / (72 * cell))))
    axes.tick_params(length=1.5, width=0.4, pad=1, labelsize=font)
    for axis, symbols, here in zip((axes.yaxis, axes.xaxis), labels, show, strict=True):
        places = list(range(0, len(symbols), step)) if here else []
        axis.set_ticks(places, [symbols[place] for place in places])
        for place, label in zip(places, axis.get_ticklabels(), strict=True):
            label.set_parse_math(False)  # a dollar is a dollar
            if axis is axes.yaxis and place in panel.due:
                label.set(color=_DUE, weight="bold")
            if axis is axes.xaxis and len(label.get_text()) > 2:
                label.set_rotation(90)


def _legend_handles(drawn: Sequence[Panel]) -> list[Any]:
    handles: list[Any] = [Patch(facecolor=_LATER, edgecolor="black", linewidth=0.4, label="comes later")]
    if any((np.isnan(panel.weights) & ~panel.later).any() for panel in drawn):
        handles.append(Patch(facecolor=_DROPPED, edgecolor="black", linewidth=0.4, label="dropped"))
    if any(panel.uncounted.any() for panel in drawn):
        handles.append(Line2D([], [], **_FRAME, label="stays, doesn't count"))
    if any(panel.due for panel in drawn):
        handles.append(Patch(fill=False, edgecolor=_DUE, label="answer due"))
    if any(panel.null for panel in drawn):
        handles.append(Line2D([], [], linestyle="", marker="x", color=_NULL, label="keeps no key"))
    return handles


def _colour_bar(figure: Any, place: tuple[float, float, float, float], font: float) -> None:
    bar = figure.colorbar(plt.cm.ScalarMappable(_NORM, _WEIGHTS), cax=figure.add_axes(place))
    bar.set_ticks([0, 0.1, 0.25, 0.5, 1], labels=["0", ".1", ".25", ".5", "1"])
    bar.ax.tick_params(labelsize=font - 1)
    bar.set_label("weight", fontsize=font)
