"""A suite: tables made of named cells, each cell a whole run config.

    def mine() -> Suite:
        cells = [
            Cell(f"{name}-{seed}", preset("demo").override([f"model.mechanism={name}", f"train.seed={seed}"]))
            for name in ("tra", "rope")
            for seed in range(4)
        ]
        return {"flip-flop": Part(cells)}

A cell's folder is named after the cell and a digest of its config, so that a finished cell is found again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tra import unknown_name
from tra.config import RunConfig, differences
from tra.runs.extensions import execute_file, find_extension, is_in_file

Measure = Literal["exact", "perplexity", "cost", "rate", "solved"]


class Cell(NamedTuple):
    """One run of a grid."""

    name: str
    config: RunConfig
    row: str = ""
    """Row of the table, the same for all seeds; by default the variant, such as `tra, margin 2`."""

    @property
    def digest(self) -> str:
        """Return a digest of the settings that differ from defaults, so that new settings don't change it."""
        settings = json.dumps(_non_default_settings(self.config), sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.digest}"


class Part(NamedTuple):
    """The cells of one table."""

    cells: list[Cell]
    measure: Measure = "exact"
    """Exact match by split, perplexity by text and window, milliseconds of a training step, or, by learning rate, the
    final loss or the share of seeds that solve the task."""
    note: str = ""
    """A remark above the table."""


Suite = dict[str, Part]


def _non_default_settings(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if dataclasses.is_dataclass(value):
            found[field.name] = _non_default_settings(value)
        elif value != default:
            found[field.name] = value
    return found


def cells_of(suite: Suite, only: Iterable[str] = ()) -> list[Cell]:
    """Return all cells, or those of the parts and mechanisms named in `only`.

    Raises:
        ValueError: If two configs have one name, or `only` has an unknown name.
    """
    only = tuple(only)
    cells = [(part, cell) for part, found in suite.items() for cell in found.cells]
    mechanisms = dict.fromkeys(cell.config.model.mechanism for _, cell in cells)
    for name in only:
        if name not in suite and name not in mechanisms:
            raise ValueError(unknown_name("part or mechanism", name, [*suite, *mechanisms]))
    seen: dict[str, Cell] = {}
    for _, cell in cells:
        first = seen.setdefault(cell.name, cell)
        if first.config != cell.config:
            changed = ", ".join(differences(first.config.to_dict(), cell.config.to_dict()))
            raise ValueError(f"two cells are called {cell.name}, but their configs differ in {changed}")
    parts = [name for name in only if name in suite]
    wanted = [name for name in only if name not in suite]
    chosen = [
        cell
        for part, cell in cells
        if (not parts or part in parts) and (not wanted or cell.config.model.mechanism in wanted)
    ]
    return list({cell.name: cell for cell in chosen}.values())


def load_suite(name: str, known: dict[str, Callable[[], Suite]]) -> Suite:
    """Return a suite by its name, by FILE.py:FUNCTION, or by the entry point of an installed package."""
    if name in known:
        return known[name]()
    if is_in_file(name):
        file, _, function = name.rpartition(":")
        if not Path(file).is_file():
            raise ValueError(f"there is no file {file}")
        make_suite = getattr(execute_file(Path(file).resolve(), f"tra_own_suite_{Path(file).stem}"), function, None)
        if not callable(make_suite):
            raise ValueError(f"{file} has no function {function}")
    else:
        make_suite = find_extension("suite", name, known)
    suite = make_suite()
    if not isinstance(suite, dict) or not all(isinstance(part, Part) for part in suite.values()):
        raise ValueError(f"{name} must return a dict of Parts, got {type(suite).__name__}")
    return suite
