"""Write README.md and figures of runs of one task, one run per variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tra.report.breakdowns import footnotes, mark, marks
from tra.report.exact_match import draw_exact_match
from tra.report.figures import links, write_figures
from tra.report.markdown import TEACHER_FORCED, facts_table, read_notes, table
from tra.report.runs import EvaluatedRun
from tra.runs import exact_text, length_text, write_atomically


def write_summary(runs_read: Sequence[EvaluatedRun], out: Path) -> list[Path]:
    """Write README.md, which includes notes.md, and the figures. Return their paths."""
    runs = {run.variant: run for run in runs_read}
    out.mkdir(parents=True, exist_ok=True)
    readme, exact = out / "README.md", out / "exact-match.png"
    write_atomically(readme, summary_text(runs, read_notes(out)))
    first = runs_read[0]
    title = f"{first.task}, {first.metrics[-1]['step']:,} training steps"
    results = {name: run.evaluation for name, run in runs.items()}
    draw_exact_match(results, exact, title=title, marks=marks(runs_read))
    return [readme, exact, *write_figures(runs_read, out)]


def summary_text(runs: dict[str, EvaluatedRun], notes: str = "") -> str:
    """Return Markdown: exact match by test set and variant, notes, figures, and the facts of each run."""
    every = list(runs.values())
    rows = [
        [row["split"], length_text(row), f"{row['examples']:,}", *(exact_text(run.evaluation[index]) for run in every)]
        for index, row in enumerate(every[0].evaluation)
    ]
    lines = [
        f"# {every[0].task}: exact match",
        "",
        "Sequences without an error, of all test sequences, with the 95 % Wilson interval. One training seed each. "
        f"{TEACHER_FORCED}",
        "",
        *table(["split", "length", "sequences", *(name + mark([run]) for name, run in runs.items())], rows),
        *(line for note in footnotes(every) for line in ("", note)),
        *(["", notes.strip()] if notes else []),
        "",
        "![exact match](exact-match.png)",
        *links(every),
        "",
        *facts_table(
            list(runs),
            every,
            {
                "batch": lambda run: run.config["train"]["batch_size"],
                "seed": lambda run: run.seed,
                "learning rate": lambda run: run.config["optim"]["lr"],
                "final loss": lambda run: f"{run.metrics[-1]['loss']:.2g}",
                "evaluated in": lambda run: run.evaluation[0]["precision"],
            },
        ),
        "",
        "Config, environment, metrics and evaluation of a run lie in its folder; `tra report` made this page.",
        "",
    ]
    return "\n".join(lines)
