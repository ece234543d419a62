"""Make the tables of a section: a row per group, cells with their words and the number they are sorted by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tra.report.curves import Level, exact_match, perplexity, splits_of, texts_of, windows_of
from tra.report.groups import Group, Section
from tra.report.names import overlap_text


def tables(section: Section) -> list[dict[str, Any]]:
    """Return exact match by test set, and perplexity by window for every text."""
    found = []
    if splits := splits_of(section.runs):
        title = "Exact match: share of sequences without an error"
        columns = [f"{split.name} ({split.label})" for split in splits]
        levels = [[exact_match(group.runs, split.name) for split in splits] for group in section.groups]
        found.append(_table(section, title, columns, levels, "test sequences"))
    for text, overlap in texts_of(section.runs):
        windows = windows_of(section.runs, text, overlap)
        columns = [f"{window:,}" for window in windows]
        levels = [[perplexity(group.runs, text, overlap, window) for window in windows] for group in section.groups]
        found.append(_table(section, f"Perplexity: {overlap_text(text, overlap)}", columns, levels, "documents"))
    return found


def _table(
    section: Section, title: str, columns: Sequence[str], levels: list[list[Level | None]], resampled: str
) -> dict[str, Any]:
    seeds = {len(group.runs) for group in section.groups}
    one = f"in brackets the 95 % interval over {resampled}"
    several = "mean over seeds, in brackets the lowest and the highest"
    note = one if seeds == {1} else several if 1 not in seeds else f"{several}; with one seed {one}"
    rows = [
        {"group": number, "cells": [{"text": str(len(group.runs)), "value": len(group.runs)}, *_cells(group, row)]}
        for number, (group, row) in enumerate(zip(section.groups, levels, strict=True))
        if any(row)
    ]
    return {"title": title, "note": f"{note.capitalize()}.", "columns": ["seeds", *columns], "rows": rows}


def _cells(group: Group, levels: Sequence[Level | None]) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = []
    for level in levels:
        if level is None:
            cells.append({"text": "", "value": None})
        else:
            fewer = f", {level.runs} of {len(group.runs)} seeds" if level.runs < len(group.runs) else ""
            cells.append({"text": level.text + fewer, "value": level.mean})
    return cells
