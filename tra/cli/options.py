"""What several verbs take."""

from __future__ import annotations

import re
from typing import Annotated

import tyro

Json = Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff]
"""Print JSON for scripts."""


def parse_duration(text: str) -> float:
    """Seconds of 90, 90s, 9m or 1h30m."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not match or not text:
        raise ValueError(f"a duration reads 90s, 9m or 1h30m, got {text!r}")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds
