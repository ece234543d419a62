"""Threshold Relative Attention: a decoder trained on short sequences that keeps working on long ones.

Public names are loaded when they are first used, so `import tra` costs nothing.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tra.attention import BoundedCache, Cache, ThresholdRelativeAttention
    from tra.model import Decoder, DecoderConfig
    from tra.ops import (
        SequenceParts,
        context_parallel_attention,
        threshold_relative_attention,
        threshold_relative_attention_paged,
        threshold_relative_attention_varlen,
    )
    from tra.runs import RunFolder, import_file

__version__ = "0.1.0"

__all__ = [
    "BoundedCache",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "RunFolder",
    "SequenceParts",
    "ThresholdRelativeAttention",
    "__version__",
    "context_parallel_attention",
    "import_file",
    "threshold_relative_attention",
    "threshold_relative_attention_paged",
    "threshold_relative_attention_varlen",
]

_HOMES = {
    "BoundedCache": "tra.attention",
    "Cache": "tra.attention",
    "Decoder": "tra.model",
    "DecoderConfig": "tra.model",
    "RunFolder": "tra.runs",
    "SequenceParts": "tra.ops",
    "ThresholdRelativeAttention": "tra.attention",
    "context_parallel_attention": "tra.ops",
    "import_file": "tra.runs",
    "threshold_relative_attention": "tra.ops",
    "threshold_relative_attention_paged": "tra.ops",
    "threshold_relative_attention_varlen": "tra.ops",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the package that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tra' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the one line that answers an unknown name: the nearest known one, or all of them if none is near.

    It stands here because every package may import it.
    """
    if ".py:" in name:
        file = name.partition(".py:")[0].rpartition("/")[2] + ".py"
        return (
            f"the {kind} {name!r} needs {file} of your own, imported only when you name it: add --import FOLDER/{file} "
            "(in Python: tra.import_file)"
        )
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    answer = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return f"unknown {kind} {name!r}: {answer}"
