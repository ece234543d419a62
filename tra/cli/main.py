"""The command: nothing else parses arguments. What its verbs do is in verbs/."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

import tra
from tra import training, unknown_name
from tra.cli.bench import bench
from tra.cli.evaluate import evaluate
from tra.cli.export import export
from tra.cli.generate import generate
from tra.cli.look import attend, report
from tra.cli.prepare import prepare
from tra.cli.suite import suite
from tra.cli.train import demo, train
from tra.text.prepare import NoSpaceError
from tra.training.distributed import RankLostError

VERBS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "attend": attend,
    "prepare": prepare,
    "report": report,
    "bench": bench,
    "suite": suite,
    "export": export,
}


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """The call that a command line asks for. What doesn't parse is a ValueError of one line."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
        raise ValueError(unknown_name("verb", arguments[0], VERBS))
    deferred: dict[str, Callable[..., Callable[[], int]]] = {}
    for name, verb in VERBS.items():

        @functools.wraps(verb)
        def later(*args: Any, _verb: Callable[..., int] = verb, **options: Any) -> Callable[[], int]:
            return functools.partial(_verb, *args, **options)

        deferred[name] = later
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                deferred,
                prog="tra",
                description="Threshold Relative Attention: train, evaluate and measure.",
                args=list(arguments),
                sort_subcommands=False,
            )
    except SystemExit as stop:
        if not stop.code:  # --help has been shown
            raise
        raise ValueError(_in_one_line(said.getvalue())) from None


def _in_one_line(box: str) -> str:
    """What a boxed message of the parser says first, and the option it thinks was meant."""
    lines = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    ends = [index for index, line in enumerate(lines) if line.startswith("───")]
    message = " ".join(lines[: ends[0]] if ends else lines)
    if "Perhaps you meant" in box:
        meant = next((line.split()[0] for line in lines if line.startswith("--")), None)
        message += f": did you mean {meant}?" if meant else ""
    return message


def main() -> None:
    """Entry point of `tra` and of `python -m tra`."""
    if sys.argv[1:] == ["--version"]:
        print(tra.__version__)
        return
    try:
        status = parse(sys.argv[1:])()
    except ValueError as error:
        print(f"tra: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (training.DiskFullError, NoSpaceError) as error:
        print(f"tra: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except RankLostError as error:
        print(f"tra: {error}; go on with --resume", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print("tra: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    raise SystemExit(status)
