"""Checkpoints that can be verified, written so that a kill at any moment leaves the previous one untouched.

A checkpoint is one safetensors file with a digest of its contents in its metadata. It is written under a temporary
name, flushed to the disk, and then renamed. For sharded weights it is a folder, see `sharded_checkpoint.py`.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tra.runs import locked_folder_beside, rename_parameters, write_atomically

KEPT_CHECKPOINTS = 2
"""Newest checkpoints that are kept: the last, and the one before in case that is damaged."""


class DamagedError(Exception):
    """A checkpoint can't be read, or its contents don't match its digest."""


class State(NamedTuple):
    """The contents of a checkpoint."""

    step: int
    tensors: dict[str, Tensor]
    path: Path | None = None
    """The file or folder that it was read from."""


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file with a digest of its contents."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    # A single metadata entry: safetensors orders several at random, and equal tensors must give equal files.
    described = {"tra": json.dumps(metadata | {"digest": _digest(tensors, metadata)}, sort_keys=True)}
    write_atomically(path, save(tensors, described))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read and verify a file of `save_tensors`."""
    try:
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = dict(json.loads((file.metadata() or {}).get("tra", "{}")))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} can't be read: {error}") from None
    if metadata.pop("digest", None) != _digest(tensors, metadata):
        raise DamagedError(f"{path} is damaged: its contents don't match its digest")
    return tensors, metadata


def save_checkpoint(folder: Path, state: State) -> Path:
    """Write `step-00001000.safetensors`, and delete all but the newest few."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{checkpoint_name(state.step)}.safetensors"
    save_tensors(path, state.tensors, {"step": str(state.step)})
    remove_old_checkpoints(folder)
    return path


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder, or of its file without the suffix."""
    return f"step-{step:08d}"


def checkpoints(folder: Path) -> list[Path]:
    """Return the files and folders of all checkpoints, oldest first."""
    return sorted((*folder.glob("step-*.safetensors"), *(path for path in folder.glob("step-*") if path.is_dir())))


def remove_old_checkpoints(folder: Path) -> None:
    """Delete all but the newest few. A folder is first moved aside, so that none is ever incomplete."""
    for old in checkpoints(folder)[:-KEPT_CHECKPOINTS]:
        if old.is_dir():
            with locked_folder_beside(old, "removing", "removed") as place:
                old.rename(place / "old")
        else:
            old.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> State:
    """Verify a checkpoint and read it."""
    if path.is_dir():
        from tra.training.sharded_checkpoint import read_sharded_checkpoint

        return read_sharded_checkpoint(path)
    tensors, metadata = load_tensors(path)
    try:
        return State(int(metadata["step"]), rename_parameters(tensors), path)
    except (KeyError, ValueError):
        raise DamagedError(f"{path} is damaged: it has no step") from None


def describe_checkpoint(path: Path) -> State:
    """Verify a checkpoint; return it with tensors on the meta device, which have only shapes."""
    if path.is_dir():
        from tra.training.sharded_checkpoint import describe_sharded_checkpoint

        return describe_sharded_checkpoint(path)
    state = read_checkpoint(path)
    return state._replace(tensors={name: tensor.to("meta") for name, tensor in state.tensors.items()})


def load_checkpoint(
    folder: Path,
    warn: Callable[[str], None] = warnings.warn,
    model: Mapping[str, Tensor] | None = None,
    read: Callable[[Path], State] = read_checkpoint,
) -> State | None:
    """Return the newest intact checkpoint, or None. A damaged one is skipped with a warning.

    Args:
        model: The state of the model to restore. A checkpoint of another model is skipped too. If only such ones are
            intact, a ValueError is raised.
        read: `read_checkpoint` or `describe_checkpoint`.
    """
    other: Path | None = None
    for path in reversed(checkpoints(folder)):
        try:
            state = read(path)
        except DamagedError as error:
            warn(f"{error}; using the checkpoint before")
            continue
        if model is None or fits(checkpoint_part(state, "model."), model):
            return state
        warn(f"{path} is of another model; using the checkpoint before")
        other = path
    if other is not None:
        raise ValueError(f"{other} is of another model than the run's, and no other checkpoint is intact")
    return None


def fits(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return whether names and shapes are the expected ones."""
    return {name: x.shape for name, x in tensors.items()} == {name: x.shape for name, x in expected.items()}


def checkpoint_part(state: State, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in state.tensors.items() if name.startswith(prefix)}


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
