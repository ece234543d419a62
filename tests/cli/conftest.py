"""Call `tra` in the tests' own process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from tra.cli.main import main

CallTra = Callable[..., tuple[int, str, str]]
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def call_tra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CallTra:
    """Return a function that runs `tra … --device cpu`, and returns its status, output and errors."""

    def call(*arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tra", *map(str, arguments), "--device", "cpu"])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as stop:
            main()
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    return call


def output_or_error(status: int, output: str, error: str) -> tuple[int, str]:
    """Return the status with the output of a command that succeeded, or the errors of one that failed."""
    return status, error if status else output
