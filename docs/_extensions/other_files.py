"""Show files from outside `docs/` as pages: a line `<!-- page: ../results/demo/README.md -->` becomes the file's text.

Links in the text are adapted. A link to a file that is a page leads to that page, a link to any other file to a copy on
the site, and a link to a folder to the first files of the folder. A link to nothing is an error. Under a page's own
title, the file's headings move down one level.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

PAGE = re.compile(r"^<!-- page: (\S+) -->$", re.MULTILINE)
LINK = re.compile(r"(!?\[[^\]\n]*\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
HEADING = re.compile(r"^(?=#+ )", re.MULTILINE)
FIRST_FILES = ("README.md", "eval.jsonl", "perplexity.jsonl", "config.json")


def pages_of_files(docs: Path) -> dict[Path, Path]:
    """Return the page that shows each file. README.md is the opening page; pages name the other files."""
    found = {docs.parent / "README.md": docs / "index.md"}
    for page in docs.rglob("*.md"):
        for name in PAGE.findall(page.read_text()):
            found[(page.parent / name).resolve()] = page
    return found


def move_links(text: str, source: Path, page: Path, pages: dict[Path, Path]) -> str:
    """Return the text of the file `source` with its links adapted to `page`."""

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if target.is_dir():
            target = next((found for name in FIRST_FILES for found in sorted(target.rglob(name))), target)
        if not target.is_file():
            raise ExtensionError(f"{source} links to {link[2]}, which is not a file")
        target = pages.get(target, target)
        return f"{link[1]}{os.path.relpath(target, page.parent)}{link[3] or ''})"

    parts = re.split(r"(^```.*?^```|`[^`\n]+`(?!\]))", text, flags=re.MULTILINE | re.DOTALL)  # code is left alone
    return "".join(part if place % 2 else LINK.sub(moved, part) for place, part in enumerate(parts))


def read(app: Sphinx, name: str, content: list[str]) -> None:
    """Replace the lines that name files by these files, and adapt the links of the page itself."""
    docs = Path(app.srcdir)
    page, pages = docs / f"{name}.md", pages_of_files(docs)

    def filled(found: re.Match[str]) -> str:
        source = (page.parent / found[1]).resolve()
        app.env.note_dependency(str(source))
        text = move_links(source.read_text(), source, page, pages)
        return HEADING.sub("#", text) if content[0].startswith("# ") else text

    content[0] = PAGE.sub(filled, move_links(content[0], page, page, pages))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
