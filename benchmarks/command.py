"""Parts of the scripts' command lines."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any

import torch


def parser(name: str, text: str | None) -> ArgumentParser:
    """Return a parser with --json and --device; the help is the first paragraph of `text`."""
    found = ArgumentParser(prog=f"python -m benchmarks.{name}", description=(text or "").split("\n\n")[0])
    found.add_argument("--json", action="store_true", help="print JSON for scripts instead of lines")
    found.add_argument("--device", help="cpu or cuda; a GPU by default if there is one")
    return found


def pick_device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def require_gpu(device: torch.device) -> torch.device:
    """Return the device.

    Raises:
        ValueError: If it is no GPU.
    """
    if device.type != "cuda":
        raise ValueError("this measures the kernels, which need a GPU")
    return device


def progress(text: str) -> None:
    print(f"measuring {text}", file=sys.stderr)


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print a result as JSON, or its rows, a line each."""
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for row in result["rows"]:
        print(", ".join(f"{name} {value}" for name, value in row.items()))


def run(main: Callable[[Sequence[str] | None], int]) -> None:
    """Call a script's `main` and exit; bad input is one line and status 2."""
    try:
        raise SystemExit(main(None))
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
