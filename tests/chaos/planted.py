"""What a command may find in its way: damaged rows, links in place of folders. Nothing is lost by it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.chaos.cases import Failure
from tests.chaos.processes import run
from tests.chaos.scenarios import Scenario, lay_out


class Planted(NamedTuple):
    """A command, what is put in its way, and what must be there afterwards."""

    scenario: Scenario
    plant: Callable[[Path], None]
    lost: Callable[[Path], list[str]]


BAD = '{"split": "iid", "exa\n'


def _damage_row(file: str, line: int) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        rows = (folder / file).read_text().splitlines(keepends=True)
        assert 0 <= line < len(rows) - 1
        (folder / file).write_text("".join([*rows[:line], BAD, *rows[line:]]))
        (folder / f"kept-{Path(file).name}").write_text("".join(rows[line:]))

    return plant


def _lost_rows(file: str, words: Callable[[str], str]) -> Callable[[Path], list[str]]:
    """Return a check that a row (what `words` makes of it) which followed the damaged one is still in the file."""

    def lost(folder: Path) -> list[str]:
        now = (folder / file).read_text()
        kept = (folder / f"kept-{Path(file).name}").read_text().splitlines()
        return [f"{file} has lost the row {row[:60]}…" for row in kept if words(row) not in now]

    return lost


def _link(name: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        (folder / "thesis" / "chapters").mkdir(parents=True)
        (folder / "thesis" / "chapters" / "one.tex").write_text("mine")
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / "thesis")

    return plant


def _lost_thesis(folder: Path) -> list[str]:
    return [] if (folder / "thesis" / "chapters" / "one.tex").is_file() else ["thesis/chapters/one.tex is gone"]


def _first(row: str) -> str:
    """Return the name of a row's split, or its step: a row may be made anew with other times."""
    return row.split(",")[0]


PLANTED = [
    Planted(
        Scenario("evaluate-damaged-rows", "evaluate run --seed 1 --splits iid", {"run": "evaluated"}),
        _damage_row("run/eval.jsonl", 0),
        _lost_rows("run/eval.jsonl", lambda row: row),
    ),
    Planted(
        Scenario("diagnose-damaged-rows", "evaluate run --diagnose --seed 1 --splits iid", {"run": "attended"}),
        _damage_row("run/diagnose.jsonl", 0),
        _lost_rows("run/diagnose.jsonl", lambda row: row),
    ),
    Planted(
        Scenario("resume-damaged-rows", "train --resume --out run", {"run": "half"}),
        _damage_row("run/metrics.jsonl", 0),
        _lost_rows("run/metrics.jsonl", _first),
    ),
    Planted(
        Scenario("prepare-link", "prepare a.txt store --tokenizer bytes", {"a.txt": "a.txt"}),
        _link(".store.preparing"),
        _lost_thesis,
    ),
    Planted(
        Scenario("export-link", "export run model", {"run": "trained"}),
        _link(".model.exporting"),
        _lost_thesis,
    ),
    Planted(
        Scenario("merge-link", "suite merge results.tar.gz --out merged", {"results.tar.gz": "results.tar.gz"}),
        _link("merged/.unpacked"),
        _lost_thesis,
    ),
]


def judge_planted(planted: Planted, templates: Path, folder: Path) -> list[Failure]:
    """Run the command with something in its way."""
    lay_out(planted.scenario, templates, folder)
    planted.plant(folder)
    outcome = run(planted.scenario.command, folder)
    found = [("kept", detail) for detail in planted.lost(folder)[:1]]
    new = [line for line in outcome.error_lines if ": resuming at step" not in line]
    if outcome.status not in (0, 1, 2) or "Traceback" in outcome.errors or (outcome.status and len(new) != 1):
        found.append(("line", f"status {outcome.status}, {len(new)} lines: {new[-1][:200] if new else ''}"))
    shutil.rmtree(folder)
    return [Failure(planted.scenario.name, "planted@0", name, "", detail) for name, detail in found]
