"""Checkpoints that know whether they are intact.

A checkpoint is one safetensors file with a digest of its contents in its metadata. It is written beside its place,
flushed to the disk, and then moved there, so a kill at any moment leaves the one before untouched.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tra.runs import write_atomically

KEPT = 2
"""Checkpoints that stay: the last one, and the one before in case it is damaged."""


class DamagedError(Exception):
    """A checkpoint that can't be read, or whose contents don't match its digest."""


class State(NamedTuple):
    """What a checkpoint holds."""

    step: int
    tensors: dict[str, Tensor]


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file with a digest, atomically."""
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    # One entry, since safetensors writes several in any order: equal tensors give equal files.
    described = {"tra": json.dumps(metadata | {"digest": _digest(tensors, metadata)}, sort_keys=True)}
    write_atomically(path, save(tensors, described))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `save_tensors` wrote, and check it."""
    try:
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = json.loads((file.metadata() or {}).get("tra", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(f"{path} can't be read: {error}") from None
    if metadata.pop("digest", None) != _digest(tensors, metadata):
        raise DamagedError(f"{path} is damaged: its contents don't match its digest")
    return tensors, metadata


def save_checkpoint(folder: Path, state: State) -> Path:
    """Write `step-00001000.safetensors`, and let go of all but the last few."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{state.step:08d}.safetensors"
    save_tensors(path, state.tensors, {"step": str(state.step)})
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("step-*.safetensors"))


def load_checkpoint(folder: Path, warn: Callable[[str], None] = warnings.warn) -> State | None:
    """The newest intact checkpoint, or None. A damaged one is passed over with a warning."""
    for path in reversed(checkpoints(folder)):
        try:
            tensors, metadata = load_tensors(path)
            return State(int(metadata["step"]), tensors)
        except DamagedError as error:
            warn(f"{error}; using the checkpoint before")
    return None


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
