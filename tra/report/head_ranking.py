"""Choose the heads of an attention map that tell most: those with large weights on single keys further back.

A head's number is a mean over the queries at which an answer is due (over all, where none is): the largest weight on a
key other than the query's own, the one before it and the first of the sequence. Many heads look at these three whatever
the input is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tra.runs import AttentionMaps, weights_of

CRITERION = "largest weights on single keys further back"


def head_scores(maps: AttentionMaps) -> npt.NDArray[np.float64]:
    """Return the number of every layer and head, `[L, H]`."""
    due = np.isin(maps.rows, maps.marked)
    rows = due if due.any() else np.ones(len(maps.rows), bool)
    back = maps.rows[rows, None] - maps.columns  # [R, C]
    counts = (back >= 2) & (maps.columns > 0)
    weights = np.nan_to_num(weights_of(maps.weights[:, :, rows]))
    found: npt.NDArray[np.float64] = np.where(counts, weights, 0).max(-1, initial=0).mean(-1, dtype=np.float64)
    return found


def top_heads(maps: AttentionMaps, most: int) -> list[tuple[int, int]]:
    """Return the indices of layer and head of the most telling heads, in the order of layers and heads."""
    numbers = head_scores(maps)
    chosen = np.argsort(-numbers, axis=None, kind="stable")[:most]
    return [divmod(int(place), numbers.shape[1]) for place in sorted(chosen)]
