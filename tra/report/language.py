"""A folder's README.md and figures from language models: perplexity by window and place, and what TRA's heads do."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tra.report._markdown import table_header, table_row
from tra.report._style import NAMES
from tra.report.perplexity import (
    Curve,
    draw_perplexity,
    draw_positions,
    perplexity_curves,
    times_as_perplexed,
)
from tra.report.runs import EvaluatedRun, in_order
from tra.report.training import draw_training, training_curves

PLACES_AT = 4096
"""The window whose places are shown."""


def write_language(runs: Sequence[EvaluatedRun], out: Path) -> list[Path]:
    """README.md, perplexity.png, places.png and training.png; notes.md beside them is taken in."""
    out.mkdir(parents=True, exist_ok=True)
    notes = out / "notes.md"
    readme, curves, places, training = (
        out / name for name in ("README.md", "perplexity.png", "places.png", "training.png")
    )
    readme.write_text(language_text(runs, notes.read_text() if notes.is_file() else "", out / "rates.tar.gz"))
    draw_perplexity({text: perplexity_curves(runs, text) for text in texts(runs)}, trained_at(runs), curves)
    first = texts(runs)[0]
    if rows := by_place(runs, first):
        draw_positions(rows, places, f"{first}, window {PLACES_AT:,}")
    draw_training(training_curves(runs), training)
    return [path for path in (readme, curves, places, training) if path.is_file()]


def texts(runs: Sequence[EvaluatedRun]) -> list[str]:
    return list(dict.fromkeys(row["text"] for run in runs for row in run.perplexity))


def trained_at(runs: Sequence[EvaluatedRun]) -> int:
    return int(runs[0].config["task"]["arguments"]["window"])


def by_place(runs: Sequence[EvaluatedRun], text: str) -> dict[str, list[tuple[int, float | None, int]]]:
    """Rows of `by_position` at PLACES_AT, the first seed of each mechanism."""
    found: dict[str, list[tuple[int, float | None, int]]] = {}
    for mechanism in in_order(runs):
        for run in runs:
            for row in run.perplexity:
                if run.mechanism == mechanism and (row["text"], row["window"], row["overlap"]) == (
                    text,
                    PLACES_AT,
                    "none",
                ):
                    found.setdefault(mechanism, row["by_position"])
    return found


def language_text(runs: Sequence[EvaluatedRun], notes: str = "", rates: Path | None = None) -> str:
    """Markdown: notes, a table per text and overlap, ratios to TRA, loss by place, TRA's heads, and the runs' facts.

    `rates` is an archive of the runs of `language-rates`, which gets a table.
    """
    first = runs[0]
    model, train = first.config["model"], first.config["train"]
    lines = [
        "# Language models: perplexity by window",
        "",
        f"{model['n_layers']} layers, {model['n_heads']} heads, width {model['d_model']}, block `{model['block']}`, "
        f"trained at window {trained_at(runs)} on {first.config['task']['arguments']['data']}, "
        f"batch {train['batch_size']}. At every window the same tokens are scored.",
        "",
        "![perplexity against window](perplexity.png)",
    ]
    if notes:
        lines += ["", notes.strip()]
    for text in texts(runs):
        for overlap, what in (("none", "windows side by side"), ("half", "windows overlapping by half")):
            curves = perplexity_curves(runs, text, overlap)
            if curves:
                lines += ["", f"## {text}, {what}", "", *_perplexity_table(curves)]
    lines += _ratios(runs)
    lines += _places(runs)
    lines += _heads(runs)
    if rates is not None and rates.is_file():
        lines += ["", "## The search of rates", "", *_rates(rates)]
    lines += ["", "## The runs", "", "![training loss](training.png)", "", *_facts(runs), ""]
    lines += [
        "Config, environment, metrics, perplexities (also by document and by place), the losses of every token and "
        "attention maps lie in a run's folder; `tra report` made this page from them.",
        "",
    ]
    return "\n".join(lines)


def _perplexity_table(curves: dict[str, Curve]) -> list[str]:
    windows = sorted({window for curve in curves.values() for window in curve.windows})
    lines = table_header("mechanism", [f"{window:,}" for window in windows])
    for mechanism, curve in curves.items():
        of = dict(zip(curve.windows, zip(curve.perplexity, curve.low, curve.high, strict=True), strict=True))
        cells = [f"{of[w][0]:.1f} ({of[w][1]:.1f}-{of[w][2]:.1f})" if w in of else "" for w in windows]
        lines.append(table_row(_name(mechanism), cells))
    return lines


def _ratios(runs: Sequence[EvaluatedRun]) -> list[str]:
    """How the others stand to TRA, document by document, where both were measured."""
    ours = next((run for run in runs if run.mechanism == "tra"), None)
    if ours is None or len(runs) < 2:
        return []
    lines = [
        "",
        "## Perplexity over that of TRA",
        "",
        "Paired by document, with 95 % intervals; above 1 TRA is better.",
    ]
    for text in texts(runs):
        rows = []
        windows = sorted({row["window"] for row in ours.perplexity if (row["text"], row["overlap"]) == (text, "none")})
        for run in (run for name in in_order(runs) for run in runs if run.mechanism == name and name != "tra"):
            has = {row["window"] for row in run.perplexity if (row["text"], row["overlap"]) == (text, "none")}
            cells = []
            for window in windows:
                if window in has:
                    middle, low, high = times_as_perplexed(run, ours, text, window)
                    cells.append(f"{middle:.3f} ({low:.3f}-{high:.3f})")
                else:
                    cells.append("")
            if any(cells):
                rows.append(table_row(_name(run.mechanism), cells))
        if rows:
            lines += ["", *table_header(text, [f"{window:,}" for window in windows]), *rows]
    return lines


def _places(runs: Sequence[EvaluatedRun]) -> list[str]:
    lines: list[str] = []
    for text in texts(runs):
        rows = by_place(runs, text)
        if rows:
            ends = [f"{end:,}" for end, _, _ in next(iter(rows.values()))]
            lines += ["", f"{text}:", "", *table_header("place up to", ends)]
            for mechanism, places in rows.items():
                lines.append(
                    table_row(_name(mechanism), ["" if mean is None else f"{mean:.2f}" for _, mean, _ in places])
                )
    if not lines:
        return []
    return ["", f"## Loss by place in a window of {PLACES_AT:,}", "", "![loss by place](places.png)", *lines]


def _heads(runs: Sequence[EvaluatedRun]) -> list[str]:
    """TRA by layer: what it keeps, how far it looks, what is left to read."""
    ours = next((run for run in runs if run.mechanism == "tra" and run.diagnosis), None)
    if ours is None:
        return []
    lines = ["", "## What TRA's heads do", ""]
    lines += ["By layer the mean over heads, and over all heads the smallest and the largest. Reach: tokens back until"]
    lines += ["the rest provably doesn't count; walked: the share of the keys before a block of 64 queries that has to"]
    lines += ["be read for it."]
    for row in ours.diagnosis:
        if row.get("walked") is None:
            continue
        layers = [f"layer {index}" for index in range(len(row["kept"]))]
        lines += ["", *table_header(row["split"].replace("/", ", "), [*layers, "heads"])]
        for measure, digits in (("kept", 2), ("null", 3), ("log_forget", 2), ("reach", 0), ("walked", 2)):
            means = [f"{sum(heads) / len(heads):.{digits}f}" for heads in row[measure]]
            every = [value for heads in row[measure] for value in heads]
            lines.append(
                table_row(
                    measure.replace("log_forget", "gate (log σ)"),
                    [*means, f"{min(every):.{digits}f} … {max(every):.{digits}f}"],
                )
            )
    return lines


def _rates(archive: Path) -> list[str]:
    """Perplexity of the validation text at the training window, by variant and rate."""
    found: dict[str, dict[float, float]] = {}
    steps = 0
    with tarfile.open(archive) as files:
        for member in sorted(files.getnames()):
            if member.endswith("/perplexity.jsonl"):
                folder = member.removesuffix("/perplexity.jsonl")
                (row,) = (json.loads(line) for line in _read(files, member).splitlines())
                config = json.loads(_read(files, f"{folder}/config.json"))
                steps = config["train"]["steps"]
                variant = folder.rsplit("/", 1)[-1].rsplit("-", 1)[0]
                found.setdefault(variant, {})[config["optim"]["lr"]] = row["perplexity"]
    rates = sorted({rate for of in found.values() for rate in of})
    lines = [
        f"{steps:,} steps of `tra suite run language-rates`: perplexity of held-out articles at the training window. "
        "`pre` is the pre-norm block, `norm` normalises queries and keys (TRA always does), `slow` starts with a gate "
        "bias of 3.",
        "",
        *table_header("variant", [f"{rate:g}" for rate in rates]),
    ]
    for variant, of in found.items():
        lines.append(table_row(variant, [f"{of[rate]:.1f}" if rate in of else "" for rate in rates]))
    return lines


def _read(files: tarfile.TarFile, member: str) -> str:
    file = files.extractfile(member)
    assert file is not None
    return file.read().decode()


def _facts(runs: Sequence[EvaluatedRun]) -> list[str]:
    def norm(run: EvaluatedRun) -> str:
        return {True: "yes", False: "no", None: "as published"}[run.config["model"]["qk_norm"]]

    facts: list[tuple[str, Any]] = [
        ("steps", lambda run: f"{run.metrics[-1]['step']:,}"),
        ("seed", lambda run: run.config["train"]["seed"]),
        ("learning rate", lambda run: run.config["optim"]["lr"]),
        ("q/k norm", norm),
        ("final loss", lambda run: f"{run.metrics[-1]['loss']:.3f}"),
        ("device", lambda run: run.environment["device"]),
        ("torch", lambda run: run.environment["torch"]),
        ("commit", lambda run: run.environment["commit"]),
        ("command", lambda run: "`tra " + " ".join(run.environment["arguments"]) + "`"),
    ]
    ordered = [run for name in in_order(runs) for run in runs if run.mechanism == name]
    lines = table_header("run", [_name(run.mechanism) for run in ordered])
    return lines + [table_row(name, [str(of(run)) for run in ordered]) for name, of in facts]


def _name(mechanism: str) -> str:
    return NAMES.get(mechanism, mechanism)
