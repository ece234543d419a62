"""Show progress bars on a terminal, lines elsewhere, and tables."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from tra.runs import exact_text, length_text, mean_over_heads

if TYPE_CHECKING:  # these import torch, which `tra prepare` doesn't need
    from tra.evaluation.diagnosis import Diagnosis
    from tra.evaluation.exact_match import SplitResult
    from tra.evaluation.perplexity import WindowResult
    from tra.training import Progress as TrainingProgress

MIN_MEASURED_SECONDS, MIN_MEASURED_STEPS = 5.0, 10
"""Seconds, or steps, after the first step at which the run's duration is estimated."""

MAX_QUIET_HOURS = 1.0
"""Hours of training on a CPU above which a line says how long it will take."""

MAX_SHOWN_LOSS = 100.0
"""From here on the perplexity is shown as infinite; `math.exp` overflows at 710."""

DIAGNOSIS_COLUMNS = {
    "negative_mass": "negative",
    "reversed": "reversed",
    "reversed_kept": "rev. kept",
    "lifted": "lifted",
    "kept": "kept",
    "counted": "counted",
    "null": "null",
    "log_forget": "gate",
    "reach": "reach",
    "walked": "walked",
}
DIAGNOSIS_CAPTION = (
    "negative: mass on keys of negative content score; reversed: pairs of keys not in the order of content, of all and "
    "of those kept; lifted: pairs in which a negative key stands above a positive one; kept: keys that stay in the "
    "softmax; counted: those that count as distance, if fewer; null: queries that keep none; reach: tokens that TRA "
    "looks back; walked: keys left to read after the early stop"
)


class _Display:
    """A progress bar, shown on a terminal only."""

    bar: Progress

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and not quiet

    def make_bar(self, *columns: ProgressColumn) -> Progress:
        return Progress(*columns, console=self.console, disable=not self.live)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


class TrainingDisplay(_Display):
    """Show step, metrics and time left; print a line for every log entry when not on a terminal.

    Args:
        is_text: The run learns text, so perplexity is shown. Exact match would be 0 for whole windows.
        on_cpu: After the first steps, say once if training will take hours.
    """

    def __init__(self, title: str, is_text: bool = False, on_cpu: bool = False) -> None:
        super().__init__()
        self.title, self.is_text, self.on_cpu = title, is_text, on_cpu
        self.begun = time.monotonic()
        self.first_step: int | None = None
        max_title = self.console.width // 3
        self.short_title = title if len(title) <= max_title else "…" + title[1 - max_title :]
        self.bar_width = 40 if self.console.width >= 120 else 10
        self.bar = self.make_bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(self.bar_width),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(),
        )
        self.bar_id: Any = None

    def __call__(self, progress: TrainingProgress) -> None:
        if progress.message:
            self._print(progress.message)
            return
        if self.first_step is None:
            self.first_step = progress.step - 1
            self.bar_id = self.bar.add_task(
                self.short_title, total=progress.steps, completed=self.first_step, metrics=""
            )
            self.first_done = time.monotonic()
        self.bar.update(self.bar_id, completed=progress.step)
        if self.on_cpu and progress.step > self.first_step + 1:
            self.on_cpu = self._measured_too_short(progress)
        if progress.metrics is None:
            return
        parts = metric_parts(progress.metrics, self.is_text)
        if self.live:
            self.bar.update(self.bar_id, metrics=self._fitting(parts, progress.steps))
        else:
            seconds = time.monotonic() - self.begun
            left = seconds / (progress.step - self.first_step) * (progress.steps - progress.step)
            line = f"{self.title} step {progress.step}/{progress.steps} {' '.join(parts)} left {left:.0f}s"
            print(line, flush=True)
        if progress.metrics.get("dead_heads"):
            heads = ", ".join(progress.metrics["dead_heads"])
            self._print(f"heads (layer.head) that keep no key at all: {heads}")

    def _measured_too_short(self, progress: TrainingProgress) -> bool:
        """Print how long training takes if that is hours; return True while it is too early to tell."""
        assert self.first_step is not None
        steps, seconds = progress.step - self.first_step - 1, time.monotonic() - self.first_done
        if seconds < MIN_MEASURED_SECONDS and steps < MIN_MEASURED_STEPS:
            return True
        hours = seconds / steps * (progress.steps - progress.step) / 3600
        if hours > MAX_QUIET_HOURS:
            self._print(
                f"step {progress.step:,} of {progress.steps:,}, about {hours:,.0f} hours to go on this CPU; "
                "the presets demo and text-demo, and those that end in -quick, are smaller"
            )
        return False

    def _fitting(self, parts: list[str], steps: int) -> str:
        """Return the first parts, as many as leave room for step count and time left."""
        others = len(self.short_title) + self.bar_width + len(f"{steps}/{steps}") + len("0:00:00") + 4
        while len(parts) > 1 and len(" ".join(parts)) > self.console.width - others:
            parts = parts[:-1]
        return " ".join(parts)

    def _print(self, text: str) -> None:
        self.console.print(f"{self.title}: {text}", markup=False, highlight=False, soft_wrap=True)


class _BarPerName(_Display):
    """A bar for every name that progress is reported of: a split, a window, a store."""

    def __init__(self, doing: str, count: ProgressColumn, quiet: bool) -> None:
        super().__init__(quiet)
        self.bar = self.make_bar(TextColumn(doing + " {task.description}"), BarColumn(), count, TimeRemainingColumn())
        self.bar_ids: dict[str, Any] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        if name not in self.bar_ids:
            self.bar_ids[name] = self.bar.add_task(name, total=total or None)
        self.bar.update(self.bar_ids[name], completed=done)


class EvaluationDisplay(_BarPerName):
    """Show a bar for every split or window: sequences or tokens that were read."""

    def __init__(self, doing: str = "evaluating", quiet: bool = False) -> None:
        super().__init__(doing, MofNCompleteColumn(), quiet)


class PrepareDisplay(_BarPerName):
    """Show a bar for every store: bytes of the sources that were read."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__("preparing", DownloadColumn(), quiet)


def metric_parts(metrics: dict[str, Any], is_text: bool = False) -> list[str]:
    """Return what a log entry says, the most important first: loss, score, speed, what TRA keeps in every layer."""
    loss = metrics["loss"]
    perplexity = math.exp(loss) if loss < MAX_SHOWN_LOSS else math.inf
    parts = [
        f"loss {loss:.4f}",
        f"accuracy {metrics['accuracy']:.3f}",
        f"perplexity {perplexity:,.1f}" if is_text else f"exact {metrics['exact']:.3f}",
        f"{metrics['tokens_per_second'] / 1e3:.0f}k tokens/s",
    ]
    if "kept" in metrics:
        parts.append(f"kept per layer {_means(metrics['kept'])}, null {_means(metrics['null'])}")
        if metrics.get("counted", metrics["kept"]) != metrics["kept"]:  # with a margin
            parts.append(f"counted {_means(metrics['counted'])}")
    return parts


def _means(by_layer: list[list[float]]) -> str:
    """Return each layer's mean over heads, as text."""
    return " ".join(f"{sum(heads) / len(heads):.2f}" for heads in by_layer)


def results_table(results: dict[str, list[SplitResult]]) -> Table:
    """Return exact match and intervals: a row for every split, a column for every run."""
    narrow: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": 0, "show_edge": False}  # four runs fit on 80 columns
    table = Table(
        "split",
        "lengths",
        "sequences",
        *results,
        title="exact match (95 % interval)",
        **narrow if len(results) > 3 else {},
    )
    for same_split in zip(*results.values(), strict=True):
        rows = [asdict(result) for result in same_split]
        table.add_row(rows[0]["split"], length_text(rows[0]), f"{rows[0]['examples']:,}", *map(exact_text, rows))
    return table


def perplexity_table(results: list[WindowResult]) -> Table:
    """Return perplexity: a row for every text and window."""
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
    """Return means over layers and heads: a row for every split, a column for every measure of the mechanism."""
    measured = [name for name in DIAGNOSIS_COLUMNS if mean_over_heads(getattr(rows[0], name)) is not None]
    if all(row.counted == row.kept for row in rows) and "counted" in measured:  # without a margin
        measured.remove("counted")
    titles = [DIAGNOSIS_COLUMNS[name] for name in measured]
    table = Table(
        "split",
        "lengths",
        *titles,
        title="attention, mean over layers and heads",
        caption=DIAGNOSIS_CAPTION,
        caption_justify="left",
        box=SIMPLE_HEAD,  # narrow: all columns stay readable on 80 columns
        padding=0,
    )
    for row in rows:
        values = [mean_over_heads(getattr(row, name)) for name in measured]
        table.add_row(row.split, length_text(asdict(row)), *("-" if v is None else f"{v:.3g}" for v in values))
    return table
