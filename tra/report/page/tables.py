"""Tables of a section: a row per group, cells with the words that are shown and the number they are sorted by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tra.report.page.charts import Level, exact_match, overlap_text, perplexity, splits_of, texts, windows
from tra.report.page.groups import Section

SEQUENCES = "95 % interval over test sequences"
DOCUMENTS = "95 % interval over documents"


def tables(section: Section) -> list[dict[str, Any]]:
    """Exact match by split, and perplexity by window for every text."""
    found = []
    sets = splits_of(section.runs, lambda run: run.evaluation)
    if sets:
        columns = [f"{each.name} ({each.label})" for each in sets]
        cells = [[exact_match(group, each.name) for each in sets] for group in section.groups]
        found.append(_table(section, "Exact match: share of sequences without an error", columns, cells, SEQUENCES))
    for text, overlap in texts(section):
        here = windows(section.runs, text, overlap)
        columns = [f"{window:,}" for window in here]
        cells = [[perplexity(group, text, overlap, window) for window in here] for group in section.groups]
        found.append(_table(section, f"Perplexity: {overlap_text(text, overlap)}", columns, cells, DOCUMENTS))
    return found


def _table(
    section: Section, title: str, columns: Sequence[str], levels: list[list[Level | None]], interval: str
) -> dict[str, Any]:
    numbers = {len(group.runs) for group in section.groups}
    one, several = f"in brackets the {interval}", "mean over seeds, in brackets the lowest and the highest"
    parts = [one] if numbers == {1} else [several] if 1 not in numbers else [several, f"with one seed {one}"]
    rows = []
    for number, (group, row) in enumerate(zip(section.groups, levels, strict=True)):
        if not any(row):
            continue
        runs = len(group.runs)
        cells = [{"text": str(runs), "value": runs}]
        for level in row:
            if level is None:
                cells.append({"text": "", "value": None})
            else:
                fewer = f", {level.runs} of {runs} seeds" if level.runs < runs else ""
                cells.append({"text": level.text + fewer, "value": level.mean})
        rows.append({"group": number, "cells": cells})
    return {"title": title, "note": "; ".join(parts).capitalize() + ".", "columns": ["seeds", *columns], "rows": rows}
