"""Import a user's mechanisms, tasks and suites: from a file, as in `mine.py:MyAttention`, or from an installed package.

A file is imported only if a person names it: on a command line (`model.mechanism=mine.py:MyAttention`,
`--import mine.py`), or in Python by `import_file`. A file that only a run folder, an archive or an exported model names
is not imported. An installed package offers names through entry points:

    [project.entry-points."tra.mechanisms"]
    windowed = "my_package:Windowed"

A run's config records where its names come from: a file's SHA-256 digest, or a package's version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal, NamedTuple

from tra import unknown_name

Kind = Literal["mechanism", "task", "suite"]

GROUPS: dict[Kind, str] = {"mechanism": "tra.mechanisms", "task": "tra.tasks", "suite": "tra.suites"}
"""Groups of entry points, by kind."""

_NAME = re.compile(r"(?P<path>.*\.py):(?P<attribute>[^:/]+)", re.DOTALL)
_FILE_NAME = re.compile(r"[\w.-]+\.py")
_MODULES_OF_BASES = ("tra.attention.shared.", "tra.tasks.base")


class ChangedFileWarning(UserWarning):
    """A user's file or package has changed since the run was trained."""


class ImportedFile(NamedTuple):
    """An imported file of the user."""

    path: Path
    digest: str
    module: ModuleType


_files: dict[str, ImportedFile] = {}  # by the file's name, without its folder


def is_in_file(name: str) -> bool:
    """Return whether a name reads FILE.py:NAME."""
    return _NAME.fullmatch(name) is not None


def without_folder(name: str) -> str:
    """Return `folder/FILE.py:NAME` as FILE.py:NAME, which configs have. Other names are returned unchanged."""
    match = _NAME.fullmatch(name)
    return name if match is None else f"{Path(match['path']).name}:{match['attribute']}"


def import_file(path: str | Path) -> ModuleType:
    """Import a file, so that configs can name its mechanisms and tasks as `file.py:Name`, and return its module.

    An imported file is imported again only if it has changed. Its folder is not added to `sys.path`.
    """
    from tra.attention import Mechanism
    from tra.tasks import Task

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if not _FILE_NAME.fullmatch(path.name):
        raise ValueError(
            f"your own file must be called NAME.py, of letters, digits, '_', '-' and '.'; got {path.name!r}"
        )
    path, digest = path.parent.resolve() / path.name, _digest(path)  # by the name that was typed, if it is a link
    known = _files.get(path.name)
    if known is not None and known.digest == digest:
        return known.module
    if known is not None and known.path != path:
        raise ValueError(f"two different files are called {path.name}: {known.path} and {path}; rename one")
    module = execute_file(path, f"tra_own_{digest[:12]}_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}")
    _files[path.name] = ImportedFile(path, digest, module)
    for attribute, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, Mechanism | Task):
            register("mechanism" if issubclass(value, Mechanism) else "task", f"{path.name}:{attribute}")
    return module


def import_named(name: str) -> str:
    """Import the file of `folder/FILE.py:NAME`, which a person has named, and return FILE.py:NAME.

    A name without a folder may be that of a file that is already imported. Other names are returned unchanged.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    path = Path(match["path"])
    if path.is_file() or path.name != match["path"] or path.name not in _files:
        import_file(path)
    return without_folder(name)


def execute_file(path: Path, module_name: str) -> ModuleType:
    """Run a file as a module. What it raises is a ValueError of one line, which names the line of the file."""
    loader = _SourceLoader(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look up their annotations there
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" (line {lines[-1]})" if lines else ""
        raise ValueError(f"{path} can't be imported: {type(error).__name__}: {error}{line}") from error
    return module


class _SourceLoader(SourceFileLoader):
    """Compile a file's text each time. What lies in `__pycache__` may be of another text, which nobody has read."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def find_extension(kind: Kind, name: str, known: Iterable[str]) -> Any:
    """Return the object that a user's name stands for: from an imported file, or from an installed entry point.

    Args:
        known: The built-in names, for the error message.
    """
    match = _NAME.fullmatch(name)
    if match is not None:
        file = _files.get(Path(match["path"]).name)
        if file is None:
            raise ValueError(unknown_name(kind, without_folder(name), known))
        if not hasattr(file.module, match["attribute"]):
            raise ValueError(f"{file.path} has no {match['attribute']}, which should be a {kind}")
        return getattr(file.module, match["attribute"])
    entry = _entry_points(kind).get(name)
    if entry is None:
        raise ValueError(unknown_name(kind, name, [*known, *_entry_points(kind)]))
    try:
        return entry.load()
    except Exception as error:
        raise ValueError(f"the {kind} {name!r} of {_package(entry)} can't be imported: {error}") from error


def register(kind: Kind, name: str, others: Iterable[str] = ()) -> None:
    """Add what `find_extension` finds to the registry of mechanisms or of tasks. Built-in names stay as they are.

    A file that is imported again replaces its former definitions.

    Args:
        others: Names besides those of the registry, for the error message.
    """
    from tra.attention import MECHANISMS, Mechanism
    from tra.tasks import TASKS, Task

    registry: dict[str, Any] = MECHANISMS if kind == "mechanism" else TASKS
    base: type[Any] = Mechanism if kind == "mechanism" else Task
    match = _NAME.fullmatch(name)
    if name in registry and (match is None or Path(match["path"]).name not in _files):
        return
    found = find_extension(kind, name, [*registry, *others])
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"the {kind} {name!r} must be a subclass of {base.__name__}, got {found!r}")
    if found.__module__.startswith(_MODULES_OF_BASES):
        raise ValueError(f"the {kind} {name!r} is no {kind}, but a class of this package to derive one from")
    registry[name] = found


def sources(names: Mapping[Kind, str], built_in: Iterable[str]) -> dict[str, str]:
    """Return where names that are not built in come from: digests of files, and versions of packages."""
    built_in = set(built_in)
    found = {}
    for kind, name in names.items():
        match = _NAME.fullmatch(name)
        if match is not None:
            file = _files.get(Path(match["path"]).name)
            if file is not None:
                found[file.path.name] = file.digest
        elif name not in built_in and name in _entry_points(kind):
            found[f"{GROUPS[kind]}:{name}"] = _package(_entry_points(kind)[name])
    return found


def check_sources(wanted: Mapping[str, str]) -> None:
    """Raise a ValueError if a file that a config needs is not imported, or a package not installed."""
    missing = [source for source in wanted if source.endswith(".py") and source not in _files]
    if missing:
        raise ValueError(_missing_files("the config", missing))
    for source, version in wanted.items():
        group, _, name = source.partition(":")
        kinds = [kind for kind, known in GROUPS.items() if known == group]
        if kinds and name not in _entry_points(kinds[0]):
            raise ValueError(
                f"the config needs the {kinds[0]} {name!r} of the package {version!r}, which is not installed here: "
                "install it first"
            )


def changed_sources(wanted: Mapping[str, str]) -> list[str]:
    """Return a line for each file or package that has changed since a config was made."""
    lines = []
    for source, version in wanted.items():
        if source.endswith(".py") and source in _files and _files[source].digest != version:
            now = _files[source].digest
            lines.append(f"{source} has changed: its SHA-256 was {version[:12]}… in training and is {now[:12]}… now")
        group, _, name = source.partition(":")
        for kind in (kind for kind, known in GROUPS.items() if known == group):
            entry = _entry_points(kind).get(name)
            if entry is not None and _package(entry) != version:
                lines.append(f"{name} has changed: it was of {version} in training and is of {_package(entry)} now")
    return lines


def imported_paths(wanted: Iterable[str]) -> list[str]:
    """Return the paths of the imported files among a config's sources."""
    return [str(_files[source].path) for source in wanted if source in _files]


def _missing_files(what: str, files: list[str]) -> str:
    options = " ".join(f"--import FOLDER/{file}" for file in files)
    return (
        f"{what} needs {' and '.join(files)} of your own, imported only when you name it: add {options} "
        "(in Python: tra.import_file)"
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _entry_points(kind: Kind) -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUPS[kind])}


def _package(entry: importlib.metadata.EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
