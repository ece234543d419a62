"""Cases that `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def slow(*cases: object) -> Sequence[Any]:
    """Cases of a parametrized test, marked slow; one of several arguments is a tuple."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
