"""Write README.md of a folder of results: what lies there, by the descriptions in its index.json."""

from __future__ import annotations

import json
from pathlib import Path

from tra.runs import write_atomically

DESCRIPTIONS = "index.json"

OPENING = """# Results

What has been measured, with the runs that it was measured on. `make report` rebuilds tables, figures and this page;
what things are is written in [index.json](index.json)."""


def write_index(folder: Path) -> Path:
    """Write the folder's README.md, and return its path."""
    readme = folder / "README.md"
    write_atomically(readme, index_text(folder))
    return readme


def index_text(folder: Path) -> str:
    """Return Markdown: a line per entry of index.json, with its runs and figures. Fails if a file has no line."""
    described = _descriptions(folder)
    _check(folder, described)
    lines = [OPENING, "", "| where | what | runs | figures |", "|---|---|---|---|"]
    for name, what in described.items():
        path = folder / name
        target = f"{name}/README.md" if (path / "README.md").is_file() else name
        runs = len(list(path.rglob("config.json")))
        drawn = sorted(path.glob("*.png")) if path.is_dir() else [path.with_suffix(".png")]
        figures = [f"[{png.stem}]({png.relative_to(folder).as_posix()})" for png in drawn if png.is_file()]
        lines.append(f"| [{name}]({target}) | {what} | {runs or ''} | {', '.join(figures)} |")
    return "\n".join([*lines, ""])


def _descriptions(folder: Path) -> dict[str, str]:
    file = folder / DESCRIPTIONS
    if not file.is_file():
        raise ValueError(f"{folder} has no {DESCRIPTIONS}, which says what lies there")
    try:
        described = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(described, dict) or not all(isinstance(what, str) for what in described.values()):
        raise ValueError(f"{file} must hold one object: a path and what lies there, in words")
    return described


def _check(folder: Path, described: dict[str, str]) -> None:
    """Check that all that is described exists, and that every file is described: itself, its folder, or its source."""
    for name in described:
        if not (folder / name).exists():
            raise ValueError(f"{DESCRIPTIONS} describes {name}, which is not in {folder}")
    covered = {folder / name for name in described} | {folder / "README.md", folder / DESCRIPTIONS}
    covered |= {path.with_suffix(".png") for path in covered if path.is_file()}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name[0] != "." and covered.isdisjoint({path, *path.parents}):
            raise ValueError(f"{path.relative_to(folder).as_posix()} has no line in {folder / DESCRIPTIONS}")
