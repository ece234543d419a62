"""Rank the heads of an attention map by how large their weights on single keys further back are.

A head's score is the mean of its largest weight on one key, over the queries at which an answer is due, or over all
queries if there are none. The query's own key, the key before it and the first key of the sequence are left out,
because many heads look at these whatever the input is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tra.runs import AttentionMaps, weights_of

CRITERION = "largest weights on single keys further back"


def head_scores(maps: AttentionMaps) -> npt.NDArray[np.float64]:
    """Return the score of every layer and head, `[L, H]`."""
    due = np.isin(maps.rows, maps.marked)
    rows = due if due.any() else np.ones(len(maps.rows), bool)
    back = maps.rows[rows, None] - maps.columns  # [R, C]
    counts = (back >= 2) & (maps.columns > 0)
    weights = np.nan_to_num(weights_of(maps.weights[:, :, rows]))
    found: npt.NDArray[np.float64] = np.where(counts, weights, 0).max(-1, initial=0).mean(-1, dtype=np.float64)
    return found


def top_heads(maps: AttentionMaps, most: int) -> list[tuple[int, int]]:
    """Return layer and head of the `most` heads with the highest scores, in the order of layers and heads."""
    scores = head_scores(maps)
    chosen = np.argsort(-scores, axis=None, kind="stable")[:most]
    return [divmod(int(place), scores.shape[1]) for place in sorted(chosen)]
