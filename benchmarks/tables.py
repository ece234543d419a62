"""Write the tables of README.md and docs/ from the runs and logs under results/, each between two comments.

<!-- table: language -->
...
<!-- end of table -->
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from tra.runs import read_rows, write_atomically

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
TABLE = re.compile(r"(<!-- table: ([^>]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
MODES = ("forward", "forward and backward")
LONG, LONGER = 16_384, 65_536

Row = Mapping[str, Any]


def pages() -> list[Path]:
    """Return the files that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """Return a page with its tables replaced by new ones."""

    def table(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise ValueError(f"unknown table {found[2]!r}: known are {', '.join(TABLES)}")
        return f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}"

    return TABLE.sub(table, text)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column names the rows."""

    def line(cells: Sequence[str]) -> str:
        return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)

    return "\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)])


def exact(run: str) -> dict[str, float]:
    """Return exact match by split."""
    return {row["split"]: row["exact"] for row in read_rows(RESULTS / run / "eval.jsonl")}


def exact_rows(runs: Mapping[str, str], splits: Sequence[str]) -> list[list[str]]:
    """Return a row for each run. The cell of a split that its task doesn't have is empty."""
    measured = {label: exact(run) for label, run in runs.items()}
    return [
        [label, *(f"{found[split]:.3f}" if split in found else "" for split in splits)]
        for label, found in measured.items()
    ]


def demo() -> str:
    """Return the demo's exact match."""
    runs = {"TRA": "tra", "TRA, margin 2": "tra-margin-2", "RoPE": "rope", "FoT": "forgetting"}
    head = ["", "in distribution", "sparse", "dense", "4× as long", "16× as long"]
    splits = ("iid", "sparse", "dense", "4x", "16x")
    return markdown(head, exact_rows({label: f"demo/{run}" for label, run in runs.items()}, splits))


LENGTHS = {
    "flip-flop": ("flipflop", ("iid", "2x", "4x", "", "16x", "64x")),
    "induct": ("lengths/induct", ("iid", "51-100", "151-200", "8x", "16x", "64x")),
    "copy": ("lengths/copy", ("iid", "51-100", "151-200", "8x", "16x", "64x")),
    "instruct": ("lengths/instruct", ("iid", "51-100", "101-200", "401-500", "", "")),
}
"""Tasks of the README's table, with their splits of the trained length and of up to 2, 4, 8, 16 and 64 times it."""


def length() -> str:
    """Return exact match of TRA and RoPE on the paper's tasks, by length. Copy has no usable run of RoPE."""
    rows = []
    for task, (folder, splits) in LENGTHS.items():
        runs = {"TRA": "tra"} if task == "copy" else {"TRA": "tra", "RoPE": "rope"}
        for label, run in runs.items():
            rows += exact_rows({f"{task}, {label}": f"{folder}/{run}"}, splits)
    return markdown(["", "as trained", "2×", "4×", "8×", "16×", "64×"], rows)


def copy_and_induct() -> str:
    runs = {"copy, TRA": "copy/tra", "induct, TRA": "induct/tra", "induct, RoPE": "induct/rope"}
    rows = exact_rows(
        {label: f"lengths/{run}" for label, run in runs.items()}, ("iid", "51-100", "201-250", "8x", "16x", "64x")
    )
    return markdown(["", "up to 50", "51-100", "201-250", "400", "800", "3,200"], rows)


def instruct() -> str:
    rows = exact_rows(
        {"TRA": "lengths/instruct/tra", "RoPE": "lengths/instruct/rope"},
        ("iid", "51-100", "101-200", "201-300", "401-500"),
    )
    return markdown(["instruct", "up to 50", "51-100", "101-200", "201-300", "401-500"], rows)


def language() -> str:
    """Return perplexity of WikiText-103's test articles by window."""
    windows, rows = (128, 1024, 4096, 16_384), []
    for label, run in {"TRA": "tra", "FoT": "forgetting", "CoPE": "cope", "RoPE": "rope"}.items():
        found = {
            row["window"]: row["perplexity"]
            for row in read_rows(RESULTS / "language" / run / "perplexity.jsonl")
            if (row["text"], row["overlap"]) == ("wikitext-test", "none")
        }
        rows.append([label, *(f"{found[window]:.1f}" for window in windows)])
    return markdown(["window", *(f"{window:,}" for window in windows)], rows)


def bench(name: str) -> list[Row]:
    """Return the rows of a log of `tra bench`."""
    rows: list[Row] = json.loads((RESULTS / "bench" / name).read_text())["rows"]
    return rows


def only(rows: Sequence[Row], **wanted: object) -> Row | None:
    """Return the one row that has these values, or None."""
    found = [row for row in rows if wanted.items() <= row.items()]
    assert len(found) <= 1, wanted
    return found[0] if found else None


def times_flash(label: str, rows: Sequence[Row], digits: int, **wanted: object) -> list[str]:
    """Return a row of speeds relative to SDPA's flash kernel, forward and with backward, at 16k and 64k."""
    cells = [label]
    for mode in MODES:
        for length in (LONG, LONGER):
            row = only(rows, mode=mode, length=length, width=64, **wanted)
            cells.append("" if row is None else f"{row['times_flash']:.{digits}f}×")
    return cells


SPEED_HEAD = ["8 heads of 64", "forward, 16k", "forward, 64k", "with backward, 16k", "with backward, 64k"]


def trained_speed() -> list[list[str]]:
    return [times_flash("a trained language model's heads", bench("op-language.json"), 1, contender="tra")]


def speed() -> str:
    """Return the operator's speed in four rows, for the README."""
    rows = bench("op-h200.json")
    dense: dict[str, object] = {"gates": "init", "content": "dense"}
    lines = [
        *trained_speed(),
        times_flash("SDPA, cuDNN's kernel", rows, 1, contender="SDPA cuDNN", **dense),
        times_flash("every key read (`tolerance=0.0`)", rows, 1, contender="tra, full walk", **dense),
        times_flash("gates at initialisation, which forget fast", rows, 1, contender="tra", **dense),
    ]
    return markdown(SPEED_HEAD, lines)


def operator() -> str:
    """Return the operator's speed with all gates and contents."""
    rows = bench("op-h200.json")
    lines = trained_speed()
    for label, contender, gates, content, digits in (
        ("a trained model's heads (flip-flop, 4)", "tra", "init", "trained", 1),
        ("gates at initialisation", "tra", "init", "dense", 1),
        ("δ = −0.05", "tra", "-0.05", "dense", 1),
        ("every key read (`tolerance=0.0`)", "tra, full walk", "init", "dense", 2),
        ("1 % of the keys kept", "tra", "init", "sparse", 2),
        ("one row in 64 keeps nothing", "tra", "init", "null rows", 2),
        ("SDPA, cuDNN's kernel", "SDPA cuDNN", "init", "dense", 2),
    ):
        lines.append(times_flash(label, rows, digits, contender=contender, gates=gates, content=content))
    return markdown(SPEED_HEAD, lines)


def decoding() -> str:
    """Return the microseconds of one token over a cache, and the speed relative to the fastest of SDPA."""
    contexts = (1024, LONG, LONGER, 262_144)
    rows = bench("decode.json")
    lines = []
    for label, gates, batch in (
        ("gates at initialisation, batch 1", "init", 1),
        ("gates at initialisation, batch 32", "init", 32),
        ("δ = −0.001, batch 1", "-0.001", 1),
    ):
        cells = [label]
        for context in contexts:
            wanted = {"contender": "tra", "batch": batch, "heads": 8, "gates": gates, "context": context}
            row = only(rows, layout="tokens first", **wanted)
            assert row is not None, wanted
            cells.append(f"{row['ms'] * 1000:.1f}, {row['times_sdpa']:.1f}×")
        lines.append(cells)
    cells = ["a trained language model's layers, batch 1"]
    for context in contexts:
        times = [
            row["times_sdpa"]
            for row in bench("decode-language.json")
            if row["contender"] == "tra" and row["context"] == context and context in (LONG, LONGER)
        ]
        cells.append(f"{min(times):.1f} to {max(times):.1f}×" if times else "")
    return markdown(["keys in the cache", *(f"{context:,}" for context in contexts)], [*lines, cells])


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "length": length,
    "copy and induct": copy_and_induct,
    "instruct": instruct,
    "language": language,
    "speed": speed,
    "operator": operator,
    "decoding": decoding,
}


def main(arguments: Sequence[str] | None = None) -> int:
    ArgumentParser(prog="python -m benchmarks.tables", description=__doc__).parse_args(arguments)
    for page in pages():
        text = page.read_text()
        if (anew := filled(text)) != text:
            write_atomically(page, anew)
            print(page)
    return 0


if __name__ == "__main__":
    command.run(main)
