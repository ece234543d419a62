"""Turn the indented blocks of docstrings, which are examples and formulas, into literal blocks."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def mark_blocks(app: Sphinx, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """Put `::` before every block that is indented after an empty line, outside the sections of arguments."""
    marked: list[str] = []
    in_section = in_block = False
    for place, line in enumerate(lines):
        indented = line.startswith("    ")
        if line and not indented:
            in_section, in_block = line in ("Args:", "Returns:", "Raises:", "Yields:"), False
        starts = indented and place > 0 and not lines[place - 1].strip() and not in_section and not in_block
        if starts:
            marked += ["::", ""]
            in_block = True
        marked.append(line)
        after = lines[place + 1] if place + 1 < len(lines) else ""
        if in_block and indented and after and not after.startswith("    "):
            marked.append("")
    lines[:] = marked


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", mark_blocks, priority=100)  # before napoleon reads the sections
    return {"parallel_read_safe": True}
