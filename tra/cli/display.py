"""What the command shows: progress bars on a terminal, lines elsewhere, and tables."""

from __future__ import annotations

import time
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tra.evaluation.diagnosis import Diagnosis
from tra.evaluation.exact_match import SplitResult
from tra.evaluation.perplexity import WindowResult
from tra.runs import exact_text, length_text, mean_over_heads
from tra.training.trainer import Progress as TrainingProgress


class _Display:
    """A rich progress bar that is only there on a terminal."""

    def __init__(self, *columns: Any, quiet: bool = False) -> None:
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and not quiet
        self.bar = Progress(*columns, console=self.console, disable=not self.live)

    def __enter__(self) -> Any:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


class TrainingDisplay(_Display):
    """Loss, accuracy, tokens per second and time left; one line per log when not on a terminal."""

    def __init__(self, title: str) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        self.title = title
        self.bar_id: Any = None
        self.begun = time.monotonic()
        self.from_step: int | None = None

    def __call__(self, progress: TrainingProgress) -> None:
        if progress.message:
            self._say(progress.message)
            return
        if self.from_step is None:
            self.from_step = progress.step - 1
            self.bar_id = self.bar.add_task(self.title, total=progress.steps, completed=self.from_step, numbers="")
        self.bar.update(self.bar_id, completed=progress.step)
        if progress.metrics is None:
            return
        numbers = metrics_line(progress.metrics)
        self.bar.update(self.bar_id, numbers=numbers)
        if not self.live:
            spent = time.monotonic() - self.begun
            left = spent / (progress.step - self.from_step) * (progress.steps - progress.step)
            print(f"{self.title} step {progress.step}/{progress.steps} {numbers} left {left:.0f}s", flush=True)
        if progress.metrics.get("dead_heads"):
            heads = ", ".join(progress.metrics["dead_heads"])
            self._say(f"heads (layer.head) that keep no key at all: {heads}")

    def _say(self, text: str) -> None:
        self.console.print(f"{self.title}: {text}", markup=False, highlight=False, soft_wrap=True)


class EvaluationDisplay(_Display):
    """One bar for all splits."""

    def __init__(self, doing: str = "evaluating", quiet: bool = False) -> None:
        super().__init__(
            TextColumn(doing + " {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            quiet=quiet,
        )
        self.tasks: dict[str, Any] = {}

    def __call__(self, split: str, done: int, total: int) -> None:
        if split not in self.tasks:
            self.tasks[split] = self.bar.add_task(split, total=total)
        self.bar.update(self.tasks[split], completed=done)


class PrepareDisplay(_Display):
    """A bar per store: bytes of the sources that were read."""

    def __init__(self, quiet: bool = False) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        super().__init__(*columns, quiet=quiet)
        self.tasks: dict[str, Any] = {}

    def __call__(self, store: str, done: int, total: int) -> None:
        if store not in self.tasks:
            self.tasks[store] = self.bar.add_task(f"preparing {store}", total=total or None)
        self.bar.update(self.tasks[store], completed=done)


def metrics_line(metrics: dict[str, Any]) -> str:
    """`loss 0.0123 accuracy 0.998 exact 0.97 81k tokens/s kept per layer 0.31 0.28, null 0.02 0.01`"""
    line = (
        f"loss {metrics['loss']:.4f} accuracy {metrics['accuracy']:.3f} exact {metrics['exact']:.3f} "
        f"{metrics['tokens_per_second'] / 1e3:.0f}k tokens/s"
    )
    if "kept" in metrics:
        kept, null = (" ".join(f"{sum(heads) / len(heads):.2f}" for heads in metrics[key]) for key in ("kept", "null"))
        line += f" kept per layer {kept}, null {null}"
    return line


def results_table(results: dict[str, list[SplitResult]]) -> Table:
    """Exact match and interval, a row per split, a column per run."""
    table = Table("split", "lengths", "sequences", *results, title="exact match (95 % interval)")
    for same_split in zip(*results.values(), strict=True):
        first, *_ = rows = [asdict(result) for result in same_split]
        table.add_row(first["split"], length_text(first), f"{first['examples']:,}", *map(exact_text, rows))
    return table


def perplexity_table(results: list[WindowResult]) -> Table:
    """A row per text and window."""
    table = Table(
        "text", "window", "overlap", "perplexity (95 %)", "a word", "a byte", "bits a byte", title="perplexity"
    )
    for row in results:
        others = (row.word_perplexity, row.byte_perplexity, row.bits_per_byte)
        table.add_row(
            row.text,
            f"{row.window:,}",
            row.overlap,
            f"{row.perplexity:.2f}" + ("" if row.low is None else f" ({row.low:.2f}-{row.high:.2f})"),
            *("-" if value is None else f"{value:.4g}" for value in others),
        )
    return table


def diagnosis_table(rows: list[Diagnosis]) -> Table:
    """Means over layers and heads, a row per split; a measure that the mechanism doesn't have is left out."""
    columns = {
        "negative_mass": "negative",
        "reversed": "reversed",
        "reversed_kept": "rev. kept",
        "lifted": "lifted",
        "kept": "kept",
        "null": "null",
        "log_forget": "gate",
        "reach": "reach",
        "walked": "walked",
    }
    shown = {name: title for name, title in columns.items() if mean_over_heads(getattr(rows[0], name)) is not None}
    table = Table(
        "split",
        "lengths",
        *shown.values(),
        title="attention, mean over layers and heads",
        caption="negative: mass on keys of negative content score; reversed: pairs of keys not in the "
        "order of content, of all and of those kept; "
        "lifted: those of a negative above a positive key; walked: keys that the early stop leaves to read",
    )
    for row in rows:
        values = [mean_over_heads(getattr(row, name)) for name in shown]
        table.add_row(row.split, length_text(asdict(row)), *("-" if v is None else f"{v:.3g}" for v in values))
    return table
