"""A suite at work, on one screen: counts, running cells, time left, and the table as it fills. Lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tra.runs import RunFolder, read_rows
from tra.suite.grid import Cell, Suite
from tra.suite.local import Report
from tra.suite.table import Entry, table

REFRESH_SECONDS = 1.0
MOST_ROWS, MOST_COLUMNS = 20, 6
"""Of the table on the screen; `tra suite table` has all of it."""


class SuiteView:
    """What `run_suite` tells, shown."""

    def __init__(self, suite: Suite, cells: Sequence[Cell], out: Path, jobs: int, budget: float | None = None) -> None:
        self.suite, self.out, self.jobs = suite, out, jobs
        self.cells = {cell.name: cell for cell in cells}
        self.reports: dict[str, Report] = {}
        self.begun = time.monotonic()
        self.deadline = None if budget is None else self.begun + budget
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self.shown_at = 0.0
        self.entries: list[Entry] = []

    def __enter__(self) -> SuiteView:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.update(self.screen(), refresh=True)
            self.live.stop()

    def __call__(self, report: Report) -> None:
        self.reports[report.name] = report
        if report.status in ("done", "skipped"):
            self.entries = table(self.suite, self.out, self._is_done)
        if self.live:
            self.tick(now=True)
        elif report.status != "started":
            took = f" in {report.seconds:.0f}s" if report.seconds else ""
            why = f": {report.last_lines.splitlines()[-1]}" if report.last_lines else ""
            print(f"{report.name}: {report.status}{took}{why} ({self.count('done', 'skipped')} of {len(self.cells)})")

    def tick(self, now: bool = False) -> None:
        """Show how running cells come along, once a second."""
        if self.live and (now or time.monotonic() - self.shown_at > REFRESH_SECONDS):
            self.shown_at = time.monotonic()
            self.live.update(self.screen(), refresh=True)

    def count(self, *statuses: str) -> int:
        return sum(report.status in statuses for report in self.reports.values())

    def seconds_left(self) -> float | None:
        """From the cells that this call has brought to their end."""
        took = [report.seconds for report in self.reports.values() if report.status == "done"]
        if not took:
            return None
        open_cells = len(self.cells) - self.count("done", "skipped", "failed", "cut off")
        return sum(took) / len(took) * open_cells / self.jobs

    def screen(self) -> Group:
        left = self.seconds_left()
        words = [
            f"{self.count('done', 'skipped')} of {len(self.cells)} done",
            f"{self.count('started')} running",
            f"{self.count('failed')} failed",
            "" if left is None else f"about {_duration(left)} left",
            "" if self.deadline is None else f"budget {_duration(max(0.0, self.deadline - time.monotonic()))}",
        ]
        running = Table("running", "step", "loss", box=None)
        for report in self.reports.values():
            if report.status == "started":
                cell = self.cells[report.name]
                rows = read_rows(RunFolder(self.out / cell.folder).metrics_file)
                step, loss = (f"{rows[-1]['step']:,}", f"{rows[-1]['loss']:.4f}") if rows else ("-", "-")
                running.add_row(report.name, f"{step} of {cell.config.train.steps:,}", loss)
        failed = [Text(f"{r.name} failed: {r.last_lines}") for r in self.reports.values() if r.status == "failed"]
        return Group(Text(", ".join(word for word in words if word)), running, *failed, *self._tables())

    def _tables(self) -> list[Table]:
        found = []
        for part in self.suite:
            mine = [entry for entry in self.entries if entry.part == part]
            if mine:
                columns = list(dict.fromkeys(entry.column for entry in mine))[:MOST_COLUMNS]
                shown = Table(part, *columns, box=None)
                for row in list(dict.fromkeys(entry.row for entry in mine))[:MOST_ROWS]:
                    by_column = {entry.column: entry for entry in mine if entry.row == row}
                    shown.add_row(row, *(f"{by_column[c].mean:.4g}" if c in by_column else "" for c in columns))
                found.append(shown)
        return found

    def _is_done(self, folder: Path) -> bool:
        """As told, without looking again."""
        names = {cell.folder: name for name, cell in self.cells.items()}
        report = self.reports.get(names.get(folder.name, ""))
        return report is not None and report.status in ("done", "skipped")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
