"""Write README.md and figures of language models: perplexity by window and position, and what TRA's heads do."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tra.report.breakdowns import footnotes, marks
from tra.report.curve_figures import (
    Curves,
    draw_perplexity,
    draw_positions,
    draw_training,
    perplexity_curves,
    training_curves,
)
from tra.report.curves import perplexity_rows, ratio_of, texts_of, windows_of
from tra.report.markdown import facts_table, grid, read_notes, table
from tra.report.names import name_of
from tra.report.runs import EvaluatedRun, by_variant
from tra.runs import mechanism_of, write_atomically

POSITIONS_WINDOW = 4096
"""The window for which the loss is shown by position."""

TRA_MEASURES = {
    "kept": ("kept", 2),
    "counted": ("counted", 2),
    "null": ("null", 3),
    "log_forget": ("gate (log σ)", 2),
    "reach": ("reach", 0),
    "walked": ("walked", 2),
}
"""Measures of TRA's heads, with their names and digits."""

Positions = list[tuple[int, float | None, int]]
"""`by_position` of perplexity.jsonl: last position, nats a token, tokens."""


def write_language(runs: Sequence[EvaluatedRun], out: Path) -> list[Path]:
    """Write README.md, with notes.md taken in, and the figures, and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    readme, perplexity, positions, training = (
        out / name for name in ("README.md", "perplexity.png", "places.png", "training.png")
    )
    write_atomically(readme, language_text(runs, read_notes(out), out / "rates.tar.gz"))
    texts = _texts(runs)
    draw_perplexity({text: perplexity_curves(runs, text) for text in texts}, _trained_window(runs), perplexity)
    if losses := losses_by_position(runs, texts[0]):
        draw_positions(losses, positions, f"{texts[0]}, window {POSITIONS_WINDOW:,}")
    draw_training(training_curves(runs), marks(runs), training)
    return [path for path in (readme, perplexity, positions, training) if path.is_file()]


def losses_by_position(runs: Sequence[EvaluatedRun], text: str) -> dict[str, Positions]:
    """Return the loss by position in POSITIONS_WINDOW, for the first seed of each variant that has it."""
    found: dict[str, Positions] = {}
    for variant, group in by_variant(runs).items():
        for run in group:
            for row in perplexity_rows(run, text, "none", POSITIONS_WINDOW):
                found.setdefault(variant, row["by_position"])
    return found


def language_text(runs: Sequence[EvaluatedRun], notes: str = "", rates: Path | None = None) -> str:
    """Return Markdown: notes, a table per text and overlap, ratios to TRA, loss by position, TRA's heads, and the runs.

    `rates` is an archive of the runs of `language-rates`, which get a table.
    """
    config = runs[0].config
    model = config["model"]
    data = config["task"]["arguments"].get("data") or "Alice's Adventures in Wonderland"
    lines = [
        "# Language models: perplexity by window",
        "",
        f"{model['n_layers']} layers, {model['n_heads']} heads, width {model['d_model']}, block `{model['block']}`, "
        f"trained at window {_trained_window(runs)} on {data}, batch {config['train']['batch_size']}. At every window "
        "the same tokens are scored.",
        "",
        "![perplexity against window](perplexity.png)",
        *(["", notes.strip()] if notes else []),
    ]
    for text in _texts(runs):
        for overlap, title in (("none", "windows side by side"), ("half", "windows overlapping by half")):
            if curves := perplexity_curves(runs, text, overlap):
                lines += ["", f"## {text}, {title}", "", *_perplexity_table(curves)]
    lines += _ratios(runs) + _positions(runs) + _heads_of_tra(runs)
    if rates is not None and rates.is_file():
        lines += ["", "## The search of rates", "", *_rates(rates)]
    ordered = [run for group in by_variant(runs).values() for run in group]
    norms = {True: "yes", False: "no", None: "as published"}
    lines += [
        "",
        "## The runs",
        "",
        "![training loss](training.png)",
        *(line for note in footnotes(runs) for line in ("", note)),
        "",
        *facts_table(
            [name_of(run.variant) for run in ordered],
            ordered,
            {
                "seed": lambda run: run.seed,
                "learning rate": lambda run: run.config["optim"]["lr"],
                "q/k norm": lambda run: norms[run.config["model"]["qk_norm"]],
                "final loss": lambda run: f"{run.metrics[-1]['loss']:.3f}",
            },
        ),
        "",
        "Config, environment, metrics, perplexities (also by document and by place), the losses of every token and "
        "attention maps lie in a run's folder; `tra report` made this page from them.",
        "",
    ]
    return "\n".join(lines)


def _texts(runs: Sequence[EvaluatedRun]) -> list[str]:
    return list(dict.fromkeys(text for text, _ in texts_of(runs)))


def _trained_window(runs: Sequence[EvaluatedRun]) -> int:
    window = runs[0].trained_length
    if window is None:
        raise ValueError(f"{runs[0].name} can't be reported: its config is of no text that can be read")
    return window


def _perplexity_table(curves: Curves) -> list[str]:
    windows = sorted({window for curve in curves.values() for window in curve.x})
    texts = {
        name_of(variant): {window: level.text for window, level in zip(curve.x, curve.levels, strict=True)}
        for variant, curve in curves.items()
    }
    return grid("mechanism", windows, texts)


def _ratios(runs: Sequence[EvaluatedRun]) -> list[str]:
    """Return a table for each text of perplexities relative to TRA's, if measured on the same documents.

    With several variants of TRA, all are compared with the first.
    """
    groups = by_variant(runs)
    base = next((variant for variant in groups if mechanism_of(variant) == "tra"), None)
    if base is None or len(runs) < 2:
        return []
    tra, name = next(run for run in runs if run.variant == base), name_of(base)
    lines = ["", f"## Perplexity over that of {name}", ""]
    lines += [f"Paired by document, with 95 % intervals; above 1 {name} is better."]
    others = [run for variant, group in groups.items() for run in group if variant != base]
    for text in _texts(runs):
        windows = windows_of([tra], text, "none")
        rows = []
        for run in others:
            ratios = [ratio_of(run, window, tra, window, text) for window in windows]
            if any(ratios):
                rows.append([name_of(run.variant), *(ratio.text if ratio else "" for ratio in ratios)])
        if rows:
            lines += ["", *table([text, *(f"{window:,}" for window in windows)], rows)]
    return lines


def _positions(runs: Sequence[EvaluatedRun]) -> list[str]:
    lines: list[str] = []
    for text in _texts(runs):
        if losses := losses_by_position(runs, text):
            ends = [end for end, _, _ in next(iter(losses.values()))]
            texts = {
                name_of(variant): {end: f"{mean:.2f}" for end, mean, _ in positions if mean is not None}
                for variant, positions in losses.items()
            }
            lines += ["", f"{text}:", "", *grid("place up to", ends, texts)]
    title = ["", f"## Loss by place in a window of {POSITIONS_WINDOW:,}", "", "![loss by place](places.png)"]
    return title + lines if lines else []


def _heads_of_tra(runs: Sequence[EvaluatedRun]) -> list[str]:
    """Return tables of what TRA's layers keep, how far they look, and what has to be read, by text and window.

    They are of the first run of each variant of TRA that was diagnosed.
    """
    groups = {v: group for v, group in by_variant(runs).items() if mechanism_of(v) == "tra"}
    found = [next((run for run in group if run.diagnosis), None) for group in groups.values()]
    shown = [run for run in found if run is not None]
    if not shown:
        return []
    lines = ["", "## What TRA's heads do", ""]
    lines += ["By layer the mean over heads, and over all heads the smallest and the largest. Reach: tokens back until"]
    lines += ["the rest provably doesn't count; walked: the share of the keys before a block of 64 queries that has to"]
    lines += ["be read for it."]
    for run in shown:
        lines += ["", f"{name_of(run.variant)}:"] if len(shown) > 1 or run.variant != "tra" else []
        lines += _head_tables(run)
    return lines


def _head_tables(run: EvaluatedRun) -> list[str]:
    lines: list[str] = []
    for row in run.diagnosis:
        if row.get("walked") is None:
            continue
        rows = []
        for measure, (name, digits) in TRA_MEASURES.items():
            if measure == "counted" and row.get("counted") in (None, row["kept"]):
                continue  # without a margin
            means = [f"{sum(heads) / len(heads):.{digits}f}" for heads in row[measure]]
            values = [value for heads in row[measure] for value in heads]
            rows.append([name, *means, f"{min(values):.{digits}f} … {max(values):.{digits}f}"])
        layers = [f"layer {index}" for index in range(len(row["kept"]))]
        lines += ["", *table([row["split"].replace("/", ", "), *layers, "heads"], rows)]
    return lines


def _rates(archive: Path) -> list[str]:
    """Return a table of validation perplexity at the training window, by variant and learning rate."""
    found: dict[str, dict[float, str]] = {}
    steps = 0
    with tarfile.open(archive) as files:
        for member in sorted(files.getnames()):
            if member.endswith("/perplexity.jsonl"):
                folder = member.removesuffix("/perplexity.jsonl")
                opened = (files.extractfile(name) for name in (member, f"{folder}/config.json"))
                row, config = (json.load(file) for file in opened if file)
                steps = config["train"]["steps"]
                variant = folder.rsplit("/", 1)[-1].rsplit("-", 1)[0]
                found.setdefault(variant, {})[config["optim"]["lr"]] = f"{row['perplexity']:.1f}"
    return [
        f"{steps:,} steps of `tra suite run language-rates`: perplexity of held-out articles at the training window. "
        "`pre` is the pre-norm block, `norm` normalises queries and keys (TRA always does), `slow` starts with a gate "
        "bias of 3.",
        "",
        *grid("variant", sorted({rate for by_rate in found.values() for rate in by_rate}), found, "g"),
    ]
