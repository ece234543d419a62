"""The test mixins of transformers, as a package whose modules lie in a folder outside of this repository.

transformers' source distribution holds `tests/test_modeling_common.py` and other mixins. This package finds them there,
so that `upstream.test_modeling_common` is an ordinary import, in child processes too. Nothing of it is copied. Two
modules are not in the distribution, `generation/test_utils.py` and `exporters/test_export.py`: those are ours.

The folder is `$TRA_TRANSFORMERS_TESTS`, or `.cache/transformers-<version>/tests`, made by `make transformers-tests`.
"""

from __future__ import annotations

import os
from pathlib import Path

import transformers

CACHE = Path(__file__).parents[4] / ".cache"


def source_folder() -> Path:
    """Return the folder in which the mixins are looked for."""
    default = CACHE / f"transformers-{transformers.__version__}" / "tests"
    return Path(os.environ.get("TRA_TRANSFORMERS_TESTS", default))


def missing_reason() -> str | None:
    """Return why the mixins can't be used, or None if they can."""
    folder = source_folder()
    if not (folder / "test_modeling_common.py").is_file():
        return (
            f"the test mixins of transformers {transformers.__version__} are not in {folder}: run `make "
            "transformers-tests`, or set TRA_TRANSFORMERS_TESTS to the folder tests/ of its source distribution"
        )
    information = folder.parent / "PKG-INFO"
    version = f"\nVersion: {transformers.__version__}\n"
    if information.is_file() and version not in information.read_text(encoding="utf-8"):
        return f"{folder} is of another version than the installed transformers {transformers.__version__}"
    return None


__path__.append(str(source_folder()))
