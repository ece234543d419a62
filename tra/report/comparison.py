"""Write README.md of many mechanisms with several seeds: exact match, and the failures of attention beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from tra.report.breakdowns import footnotes, mark
from tra.report.curves import diagnosis, exact_match, newest
from tra.report.figures import links, write_figures
from tra.report.markdown import TEACHER_FORCED, read_notes, table
from tra.report.names import FAILURES, name_of
from tra.report.runs import EvaluatedRun, by_variant
from tra.runs import length_text, permutation_p, settings_of, write_atomically

Groups = dict[str, list[EvaluatedRun]]


def write_comparison(runs: Sequence[EvaluatedRun], out: Path) -> list[Path]:
    """Write README.md, with notes.md taken in, and the figures, and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    readme = out / "README.md"
    write_atomically(readme, comparison_text(runs, read_notes(out)))
    return [readme, *write_figures(runs, out)]


def comparison_text(runs: Sequence[EvaluatedRun], notes: str = "") -> str:
    """Return Markdown: exact match, notes, what attention does by length, training, and how to make it again."""
    groups = by_variant(runs)
    _check_alike(runs, groups)
    first = runs[0]
    model, train = first.config["model"], first.config["train"]
    splits = [row["split"] for row in first.evaluation]
    header = ["mechanism", "lr", *(f"{row['split']} ({length_text(row)})" for row in first.evaluation)]
    rows = []
    for variant, group in groups.items():
        levels = [level for split in splits if (level := exact_match(group, split))]
        texts = [level.text if level.runs > 1 else f"{level.mean:.3f}" for level in levels]
        rows.append([name_of(variant) + mark(group), f"{group[0].config['optim']['lr']:g}", *texts])
    lines = [
        f"# {first.task}: every mechanism",
        "",
        f"Sequences without an error, mean of {len({run.seed for run in runs})} seeds, with the worst and the best "
        f"where they differ. {first.metrics[-1]['step']:,} steps, batch {train['batch_size']}, {model['n_layers']} "
        f"layers, {model['n_heads']} heads, width {model['d_model']}. {TEACHER_FORCED}",
        "",
        *table(header, rows),
        *(line for note in footnotes(runs) for line in ("", note)),
        *links(runs, "exact-by-length.png"),
        *(["", notes.strip()] if notes else []),
        *_over_seeds(groups, splits, header),
        "",
        "## The two failures",
        "",
        "Means over layers, heads and seeds, at queries where an answer is due.",
        *links(runs, "failures.png"),
    ]
    header.remove("lr")
    for measure, title in FAILURES.items():
        if any(row.get(measure) for run in runs for row in run.diagnosis):
            rows = _diagnosis_rows(groups, splits, {measure: "{:.3f}"})
            lines += ["", f"{title[0].upper()}{title[1:]} (`{measure}`):", "", *table(header, rows)]
    measures = {"kept": "kept {:.3f}", "counted": "counted {:.3f}", "null": "null {:.3f}"}
    measures |= {"log_forget": "gate {:.2f}", "reach": "reach {:.0f}"}
    counted = ", keys that count as distance" if any(settings_of(variant)[1] for variant in groups) else ""
    commits = ", ".join(sorted({str(run.environment["commit"]) for run in runs}))
    lines += [
        "",
        f"Keys kept{counted}, null rows, gate (log σ) and reach (tokens back until the rest provably doesn't count):",
        "",
        *table(header, _diagnosis_rows(groups, splits, measures)),
        *links(runs, "heads.png", "kept.png"),
        "",
        "## Training",
        *links(runs, "training.png"),
        "",
        "## Made by",
        "",
        f"`{first.command}` on {first.environment['device']}, torch {first.environment['torch']}, commit {commits}. "
        "Every run's config, environment, metrics, evaluation and diagnosis lie in its folder; `tra report` made this "
        "page from them.",
        "",
    ]
    return "\n".join(lines)


def _over_seeds(groups: Groups, splits: Sequence[str], header: Sequence[str]) -> list[str]:
    """Return lines on the spread over seeds, and on tests of the first variant's mean against every other's."""
    names = list(groups)
    seeds = min(len(group) for group in groups.values())
    if seeds < 2 or len(names) < 2:
        return []
    rows = []
    for variant, group in groups.items():
        cells = []
        for split in splits:
            own, first = _exact_by_seed(group, split), _exact_by_seed(groups[names[0]], split)
            spread = f"{statistics.fmean(own):.3f} ± {statistics.stdev(own):.3f}"
            is_tested = variant != names[0] and set(own) | set(first) != {own[0]}
            cells.append(f"{spread}, p {permutation_p(own, first):.2g}" if is_tested else spread)
        rows.append([name_of(variant), *cells])
    return [
        "",
        "## Over seeds",
        "",
        f"Mean ± standard deviation over {seeds} seeds, and p of an exact permutation test of the seeds against "
        f"{name_of(names[0])}'s, two-sided, where they differ at all. It doesn't allow for the number of tests.",
        "",
        *table([name for name in header if name != "lr"], rows),
    ]


def _exact_by_seed(group: Sequence[EvaluatedRun], split: str) -> list[float]:
    return [row["exact"] for run in group for row in newest(run.evaluation, split)]


def _check_alike(runs: Sequence[EvaluatedRun], groups: Groups) -> None:
    """Check that runs differ in what is compared alone. A ValueError says in what else they differ."""
    if len({tuple(run.seed for run in group) for group in groups.values()}) > 1:
        raise ValueError("a comparison needs the same seeds of every mechanism")
    for variant, group in groups.items():
        if len({run.config["optim"]["lr"] for run in group}) > 1:
            raise ValueError(f"the runs of {variant} have different learning rates: compare one at a time")
        if len(codes := {run.code for run in group}) > 1:
            raise ValueError(f"the runs of {variant} were trained with different files: {'; '.join(sorted(codes))}")
    if len({run.metrics[-1]["step"] for run in runs}) > 1:
        raise ValueError("the runs have different steps: make them alike first")
    if len({tuple((row["examples"], row["seed"]) for row in run.evaluation) for run in runs}) > 1:
        raise ValueError("the runs have different test sequences: make them alike first")


def _diagnosis_rows(groups: Groups, splits: Sequence[str], measures: dict[str, str]) -> list[list[str]]:
    """Return a row for each variant that has any of the measures, with its means by test set.

    `measures` has the format of the number of each name in diagnose.jsonl.
    """
    rows = []
    for variant, group in groups.items():
        cells = []
        for split in splits:
            levels = {measure: diagnosis(measure, group, split) for measure in measures}
            if levels.get("counted") == levels.get("kept"):  # without a margin
                levels.pop("counted", None)
            cells.append(", ".join(measures[m].format(level.mean) for m, level in levels.items() if level))
        if any(cells):
            rows.append([name_of(variant), *cells])
    return rows
