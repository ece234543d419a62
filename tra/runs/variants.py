"""Name variants: a mechanism, with its own arguments, and its threshold and margin if these are not 0."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?"
_VARIANT = re.compile(
    rf"(?P<mechanism>.*?)(?: \((?P<arguments>\w+ .*)\))?(?:, threshold (?P<threshold>{_NUMBER}))?"
    rf"(?:, margin (?P<margin>{_NUMBER}|inf))?",
    re.DOTALL,
)


def variant_of(model: Mapping[str, Any]) -> str:
    """Return the variant that a config's section `model` describes: `tra`, or `tra, threshold -1, margin inf`.

    A mechanism's own arguments follow its name: `mine.py:Windowed (window 8)`. Configs of former versions have no
    arguments, threshold or margin; the last two are then 0.
    """
    variant: str = model["mechanism"]
    if arguments := model.get("arguments"):
        variant += f" ({', '.join(f'{key} {json.dumps(value)}' for key, value in sorted(arguments.items()))})"
    for name in ("threshold", "margin"):
        value = float(model.get(name) or 0)
        if value:
            short = f"{value:g}"
            variant += f", {name} {short if float(short) == value else repr(value)}"
    return variant


def mechanism_of(variant: str) -> str:
    """Return the mechanism of a variant."""
    return _parts(variant)["mechanism"] or ""


def settings_of(variant: str) -> tuple[float, float]:
    """Return threshold and margin of a variant."""
    parts = _parts(variant)
    return float(parts["threshold"] or 0), float(parts["margin"] or 0)


def _parts(variant: str) -> dict[str, str | None]:
    match = _VARIANT.fullmatch(variant)
    assert match is not None  # any text matches as a mechanism
    return match.groupdict()
