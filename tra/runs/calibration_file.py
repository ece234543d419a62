"""Read and write windows.json, the result of a calibration: how many of the newest keys each head needs.

Needs no torch. The file says on which weights and which text the windows were measured. Windows of another model are
refused, because their error is unknown.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tra.runs.files import write_atomically
from tra.runs.folder import RunFolder
from tra.runs.row_checks import is_finite
from tra.runs.variants import variant_of

FORMAT = 1
"""Version of the file's format; files of a later version are refused."""

STATISTICS = ("tail", "mean")
"""What the tolerance limits: the dropped weight at all but one query in a thousand, or its mean."""

MAX_WINDOW = 2**40
"""Largest window that a file may hold."""

PerHead = list[list[int]]
"""A number for each layer and head."""


@dataclass(frozen=True)
class Calibration:
    """The contents of windows.json. Lists are by layer, then by head."""

    weights_sha256: str
    """SHA-256 digest of model.safetensors, see `model_identity`."""
    model: dict[str, Any]
    """The section `model` of the run's config."""
    variant: str
    tolerance: float
    statistic: str
    """`tail` or `mean`: which of the two a cache's windows come from."""
    text: str
    source: str
    """`documents`, `running text`, or the split of a task."""
    length: int
    """Tokens of a sequence. Queries of its second half are measured, with windows up to half of the length."""
    sequences: int
    queries: int
    seed: int
    device: str
    seconds: float
    windows: PerHead
    """Windows by the statistic above; the whole length for heads for which no measured window is enough."""
    mean_windows: PerHead
    """Smallest windows at which the mean of the dropped weight is below the tolerance."""
    tail_windows: PerHead
    """Smallest windows at which at most one query in a thousand drops a weight above the tolerance."""
    open_heads: list[list[int]]
    """(layer, head) for which no measured window is enough. They need longer sequences, or look back without limit."""
    dropped: list[list[list[float] | None]]
    """(mean, low, high) of the weight that `windows` drop: 95 % intervals from resampled sequences. None if open."""
    beyond: list[list[float | None]]
    """Share of queries for which `windows` drop more than the tolerance; None for open heads."""


def model_identity(run: RunFolder) -> dict[str, Any]:
    """Return what identifies a run's model: its weights, its config, its variant."""
    if not run.weights_file.is_file():
        raise ValueError(f"{run.path} has no model.safetensors yet: the run hasn't ended")
    with run.weights_file.open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        model = json.loads(run.config_file.read_bytes())["model"]
        return {"weights_sha256": weights, "model": model, "variant": variant_of(model)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{run.config_file} is damaged: it has no model") from None


def write_windows(file: Path, calibration: Calibration) -> None:
    """Write a calibration, with a line for each field and each layer."""
    lines = []
    for name, value in ({"format": FORMAT} | asdict(calibration)).items():
        if isinstance(value, list) and value:
            rows = ",\n    ".join(json.dumps(row) for row in value)
            lines.append(f"  {json.dumps(name)}: [\n    {rows}\n  ]")
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    write_atomically(file, "{\n" + ",\n".join(lines) + "\n}\n")


def check_replaceable(file: Path, run: RunFolder) -> None:
    """Raise a ValueError if a file is there that is not a calibration, and so must not be written over.

    The run's own windows.json may be damaged, and is then measured anew.
    """
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name a .json file to write to")
    if file.suffix != ".json":
        raise ValueError(f"windows are written to a .json file, got {file}")
    if file.exists() and file.resolve() != run.windows_file.resolve():
        try:
            _parse(file)
        except ValueError:
            raise ValueError(f"{file} exists, and is not a calibration: it is not overwritten") from None


def read_windows(file: Path, run: RunFolder) -> Calibration:
    """Return the calibration of a run's model. Raise a ValueError if it is damaged, or of another model."""
    if not file.is_file():
        raise ValueError(f"there is no {file}: tra calibrate {run.path} measures windows")
    calibration = _parse(file)
    identity = model_identity(run)
    for name, what in (("weights_sha256", "weights"), ("model", "config")):
        if getattr(calibration, name) != identity[name]:
            raise ValueError(f"{file} was measured on another model than {run.path}: its {what} differ; calibrate anew")
    return calibration


def _parse(file: Path) -> Calibration:
    try:
        content = json.loads(file.read_bytes().decode())
        version = content.pop("format")
        if not isinstance(version, int):
            raise TypeError(f"format must be a number, got {version!r}")
        if version > FORMAT:
            raise ValueError(f"it has format {version}, this version of tra reads up to {FORMAT}")
        missing = [field.name for field in fields(Calibration) if field.name not in content]
        if missing:
            raise ValueError(f"it has no {missing[0]}")
        calibration = Calibration(**{field.name: content[field.name] for field in fields(Calibration)})
        _check(calibration)
        return calibration
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, or not a calibration: {error}") from None


def _check(calibration: Calibration) -> None:
    """Raise an error if the fields that are used have unexpected types or sizes."""
    if not isinstance(calibration.model, dict):
        raise TypeError("model must be an object")
    if not is_finite(calibration.tolerance) or not 0 < calibration.tolerance < 1:
        raise ValueError("tolerance must be a number above 0 and below 1")
    layers, heads = calibration.model["n_layers"], calibration.model["n_heads"]
    for rows in _grids(calibration):
        if len(rows) != layers or any(len(row) != heads for row in rows):
            raise ValueError(f"its windows are not those of {layers} layers of {heads} heads")
    for rows in _grids(calibration):
        for window in (window for row in rows for window in row):
            if type(window) is not int or not 1 <= window <= MAX_WINDOW:
                raise ValueError(f"a window must be a number of at least 1, got {window!r}")


def _grids(calibration: Calibration) -> tuple[PerHead, ...]:
    return calibration.windows, calibration.mean_windows, calibration.tail_windows
