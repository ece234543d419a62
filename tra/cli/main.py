"""Entry point of `tra`: find the verb, parse its arguments, run it, and answer expected errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

from tra import __version__, unknown_name
from tra.cli.options import Parser, add_imports
from tra.runs import ChangedFileWarning, import_file
from tra.runs.failures import explain_failure, one_line

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("tra.cli.demo", "compare TRA with two rivals on a small task, in minutes on a laptop"),
    "train": ("tra.cli.train", "train one model, from a preset or a config file"),
    "evaluate": ("tra.cli.evaluate", "measure a trained run: exact match by length, or perplexity"),
    "generate": ("tra.cli.generate", "let a trained run continue a prompt"),
    "calibrate": ("tra.cli.calibrate", "measure how much context each head of TRA needs"),
    "attend": ("tra.cli.attend", "draw what runs attend to on one sequence"),
    "prepare": ("tra.cli.prepare", "turn text into tokens for training and evaluation"),
    "suite": ("tra.cli.suite", "train and measure a grid of runs, and make its tables"),
    "report": ("tra.cli.report", "make tables, figures or one HTML page of evaluated runs"),
    "bench": ("tra.cli.bench", "measure speed and memory on this machine"),
    "export": ("tra.cli.export", "save a trained run as a folder that transformers loads"),
}
"""Name -> module with DESCRIPTION, `add_arguments(parser)` and `run(options)`, and one line of help.

A verb's module is imported only when its verb is named, and imports torch only when it runs.
"""

HELP = """usage: tra VERB ...
       tra VERB --help

Threshold Relative Attention: decoders trained on short sequences that keep
working on long ones.

verbs:
{verbs}

options:
  -h, --help  show this text; after a verb, show its options
  --version   show the version

first steps:
  tra demo                              see TRA and its rivals on long sequences
  tra train --preset flipflop-quick     train a model of your own
  tra evaluate runs/flipflop-quick-tra  measure it"""


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """Return the call that a command line asks for. What doesn't parse is a ValueError of one line."""
    if not arguments:
        raise ValueError(f"name a verb: {', '.join(VERBS)} (tra --help)")
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(HELP.format(verbs="\n".join(f"  {verb:<9} {line}" for verb, (_, line) in VERBS.items())))
        raise SystemExit(0)
    if name == "--version":
        print(__version__)
        raise SystemExit(0)
    if name not in VERBS:
        raise ValueError(unknown_name("option" if name.startswith("-") else "verb", name, VERBS))
    return functools.partial(_run, parser_of(name).parse(rest), importlib.import_module(VERBS[name][0]))


def parser_of(name: str) -> Parser:
    """Return the parser of a verb, with all its options."""
    verb = importlib.import_module(VERBS[name][0])
    parser = Parser(f"tra {name}", verb.DESCRIPTION)
    verb.add_arguments(parser)
    if name not in ("demo", "prepare"):  # these two use no files of the user
        add_imports(parser)
    return parser


def _run(options: argparse.Namespace, verb: ModuleType) -> int:
    """Import the user's files that the command line names, and run the verb."""
    for path in getattr(options, "imports", ()):
        import_file(path)
    return verb.run(options)


def main() -> None:
    """Run `tra` or `python -m tra`."""
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
    with _interrupts() as was_interrupted:
        try:
            status = parse(sys.argv[1:])()
        except ValueError as error:
            _stop(str(error), 2)
        except BrokenPipeError:  # the reader of the output has closed it, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None
        except KeyboardInterrupt:
            _stop("interrupted", 130)
        except Exception as error:
            if was_interrupted():  # by code that turned the interruption into an error of its own
                _stop("interrupted", 130)
            line = _explain(error)
            if line is None:
                raise
            _stop(line, 1)
    raise SystemExit(status)


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed.

    While torch is imported, the process ends at once: torch takes a KeyboardInterrupt for a broken installation.
    """
    interrupted = False

    def interrupt(_number: int, _frame: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        spec = getattr(sys.modules.get("torch"), "__spec__", None)
        if getattr(spec, "_initializing", False):
            os.write(2, b"tra: interrupted\n")
            os._exit(130)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    is_default = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_default:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: interrupted
    finally:
        if is_default:
            signal.signal(signal.SIGINT, before)


def _show_warning(others: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any) -> None:
    """Print warnings for users as one line, without the place in the code."""
    if issubclass(category, ChangedFileWarning):
        print(f"tra: warning: {one_line(str(message))}", file=sys.stderr)
    else:
        others(message, category, *place)


def _explain(error: Exception) -> str | None:
    """Return one line about a failure of the machine; None if the error is a bug."""
    if (line := explain_failure(error)) is not None:
        return line
    from tra.text.prepare import NoSpaceError
    from tra.training import DiskFullError, NonFiniteError, RankLostError

    if isinstance(error, RankLostError):
        return f"{error}; go on with --resume"
    return str(error) if isinstance(error, DiskFullError | NonFiniteError | NoSpaceError) else None


def _stop(line: str, status: int) -> NoReturn:
    print(f"tra: {one_line(line)}", file=sys.stderr)
    raise SystemExit(status) from None
