"""Write runs as one HTML file that needs nothing else, with curves, tables and maps to look into."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tra.report.page.data import page_data
from tra.report.runs import Problem
from tra.runs import write_atomically

FOLDER = Path(__file__).parent
SCRIPTS = ("base.js", "charts.js", "tables.js", "maps.js", "page.js")
ESCAPES = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})


def write_page(folders: Sequence[Path], out: Path) -> list[Problem]:
    """Write the page of these runs, and return what it could not show. A ValueError where no run can be shown."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder: the page is a file")
    data, problems = page_data(folders, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page_text(data))
    return problems


def page_text(data: dict[str, Any]) -> str:
    """Return the HTML. Only scripts with the right digest run, nothing is fetched, and no text of a run is HTML."""
    from plotly.offline import get_plotlyjs

    own, style, template = (
        "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names)
        for names in (SCRIPTS, ["page.css"], ["template.html"])
    )
    scripts = [get_plotlyjs(), f'"use strict";\n(() => {{\n{own}\n}})();\n']
    # browsers read \r\n as \n before they take the digest
    scripts = [script.replace("\r\n", "\n").replace("\r", "\n") for script in scripts]
    assert not any("</script" in script.lower() or "<!--" in script for script in scripts)
    parts = {
        "POLICY": f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'",
        "STYLE": style,
        "DATA": embedded(data),
        "PLOTLY": scripts[0],
        "SCRIPT": scripts[1],
    }
    pieces = template.split("@@")  # text, name, text, …, text: what is put in is not searched for names
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def embedded(data: Any) -> str:
    """Return JSON that can stand in a script element, whatever its strings hold."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(ESCAPES)


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
