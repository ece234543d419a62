"""List the arguments of a constructor, with those of its base classes."""

from __future__ import annotations

import inspect
import typing
from typing import Any


def constructor_arguments(kind: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the constructor's arguments by name, with those that it passes on as `**options` to its base class.

    Annotations are types; Any if an argument has none.
    """
    found: dict[str, inspect.Parameter] = {}
    for level in kind.__mro__:
        if "__init__" not in vars(level):
            continue
        make: Any = vars(level)["__init__"]
        try:
            hints = typing.get_type_hints(make)
        except NameError:  # a type that only type checkers import
            hints = {}
        _, *parameters = inspect.signature(make).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, parameter.replace(annotation=hints.get(parameter.name, Any)))
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found
