"""Settings of the operator's tests."""

from __future__ import annotations

import pytest

from tra.ops.triton import eager


@pytest.fixture(autouse=True)
def no_call_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests change what launchers read, which a remembered call wouldn't notice; see `test_eager.py` for those."""
    monkeypatch.setattr(eager, "takes", lambda _: False)
