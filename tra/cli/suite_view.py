"""Show the progress of `tra suite run`: counts, running cells, time left and tables on one screen; lines elsewhere."""

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
from tra.suite.cell_process import Report
from tra.suite.grid import Cell, Suite
from tra.suite.table import Entry, table

REFRESH_SECONDS = 1.0
MAX_TABLE_ROWS, MAX_TABLE_COLUMNS = 20, 6
"""Largest size of a table on the screen; `tra suite table` prints all of it."""


class SuiteView:
    """Show the reports of `run_suite`."""

    def __init__(self, suite: Suite, cells: Sequence[Cell], out: Path, jobs: int, budget: float | None = None) -> None:
        self.suite, self.out, self.jobs = suite, out, jobs
        self.cells = {cell.name: cell for cell in cells}
        self.reports: dict[str, Report] = {}
        self.begun = time.monotonic()
        self.deadline = None if budget is None else self.begun + budget
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self.refreshed_at = 0.0
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
            seconds = f" in {report.seconds:.0f}s" if report.seconds else ""
            reason = f": {report.last_lines.splitlines()[-1]}" if report.last_lines else ""
            done = f"{self.count('done', 'skipped')} of {len(self.cells)}"
            print(f"{report.name}: {report.status}{seconds}{reason} ({done})")

    def tick(self, now: bool = False) -> None:
        """Refresh the screen, at most once a second unless `now`."""
        if self.live and (now or time.monotonic() - self.refreshed_at > REFRESH_SECONDS):
            self.refreshed_at = time.monotonic()
            self.live.update(self.screen(), refresh=True)

    def count(self, *statuses: str) -> int:
        return sum(report.status in statuses for report in self.reports.values())

    def seconds_left(self) -> float | None:
        """Return an estimate from the cells that this call has finished; None before the first."""
        seconds = [report.seconds for report in self.reports.values() if report.status == "done"]
        if not seconds:
            return None
        open_cells = len(self.cells) - self.count("done", "skipped", "failed", "cut off")
        return sum(seconds) / len(seconds) * open_cells / self.jobs

    def screen(self) -> Group:
        failed = [Text(f"{r.name} failed: {r.last_lines}") for r in self.reports.values() if r.status == "failed"]
        return Group(self._summary(), self._running(), *failed, *self._tables())

    def _summary(self) -> Text:
        parts = [
            f"{self.count('done', 'skipped')} of {len(self.cells)} done",
            f"{self.count('started')} running",
            f"{self.count('failed')} failed",
        ]
        left = self.seconds_left()
        if left is not None:
            parts.append(f"about {_duration(left)} left")
        if self.deadline is not None:
            parts.append(f"budget {_duration(max(0.0, self.deadline - time.monotonic()))}")
        return Text(", ".join(parts))

    def _running(self) -> Table:
        running = Table("running", "step", "loss", box=None)
        for report in self.reports.values():
            if report.status == "started":
                cell = self.cells[report.name]
                rows = read_rows(RunFolder(self.out / cell.folder).metrics_file, ("step", "loss"))
                step, loss = (f"{rows[-1]['step']:,}", f"{rows[-1]['loss']:.4f}") if rows else ("-", "-")
                running.add_row(report.name, f"{step} of {cell.config.train.steps:,}", loss)
        return running

    def _tables(self) -> list[Table]:
        tables = []
        for part, cells in self.suite.items():
            means = {(entry.row, entry.column): entry.mean for entry in self.entries if entry.part == part}
            if means:
                columns = list(dict.fromkeys(column for _, column in means))[:MAX_TABLE_COLUMNS]
                shown = Table(part, *columns, box=None, title=cells.note or None, title_justify="left")
                for row in list(dict.fromkeys(row for row, _ in means))[:MAX_TABLE_ROWS]:
                    shown.add_row(row, *(f"{means[row, c]:.4g}" if (row, c) in means else "" for c in columns))
                tables.append(shown)
        return tables

    def _is_done(self, folder: Path) -> bool:
        """Answer from the reports, without reading the folder again."""
        reports = [self.reports.get(name) for name, cell in self.cells.items() if cell.folder == folder.name]
        return any(report is not None and report.status in ("done", "skipped") for report in reports)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
