"""Checkpoints of sharded weights: a folder in which each process writes its part, read by any number of processes.

`torch.distributed.checkpoint` writes and reads the parts, as safetensors. A manifest with the digest of every file is
written last, and then the folder gets its name. What a kill leaves before that doesn't count as a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

from tra.runs import flush_folder, locked_folder_beside, replace_folder, write_atomically
from tra.training.checkpoint import DamagedError, State, checkpoint_name, remove_old_checkpoints
from tra.training.distributed import Ranks, explain_lost_rank

MANIFEST = "manifest.json"
READERS = 8
"""Number of files whose digests are computed at once."""


def save_sharded_checkpoint(folder: Path, step: int, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Write the folder `step-00001000`, and delete all but the newest checkpoints. All processes call it.

    Args:
        tensors: Sharded tensors, or whole ones that are equal in all processes.
    """
    target = folder / checkpoint_name(step)
    with contextlib.ExitStack() as stack:

        def begin() -> Path:
            folder.mkdir(parents=True, exist_ok=True)
            place = stack.enter_context(locked_folder_beside(target, "saving", "saved"))
            (place / "new").mkdir()
            return place / "new"

        def finish() -> None:
            files = {name: digest for part in parts for name, digest in part.items()}
            write_atomically(new / MANIFEST, json.dumps({"step": step, "files": files}, indent=2) + "\n")
            flush_folder(new)
            replace_folder(new, target, new.parent)
            remove_old_checkpoints(folder)

        new = ranks.run_on_first(begin)
        _write_parts(new, tensors, ranks)
        written = ranks.from_first(sorted(new.iterdir()) if ranks.is_first else None)
        parts = ranks.gather(_digests(written[ranks.rank :: ranks.world]))
        ranks.run_on_first(finish)


def _write_parts(new: Path, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    writer = HuggingFaceStorageWriter(str(new), save_distributed=True)
    try:
        with explain_lost_rank():
            save(tensors, storage_writer=writer, process_group=ranks.control, no_dist=not ranks.has_others)
    except CheckpointException as error:  # raised in all processes, whichever failed
        if not ranks.is_first:
            raise SystemExit(1) from None
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, OSError)), causes[0]) from None


def describe_sharded_checkpoint(path: Path) -> State:
    """Verify the digests of a checkpoint; return it with tensors on the meta device, which have shapes alone."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        step, expected = manifest["step"], manifest["files"]
        if type(step) is not int or not isinstance(expected, dict):
            raise TypeError("it has no step or no files")
        files = [file for file in path.iterdir() if file.name != MANIFEST]
        if {file.name for file in files} != expected.keys():
            raise ValueError("its files are not those of its manifest")
        if _digests(files) != expected:
            raise ValueError("its contents don't match their digests")
        stored = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        tensors = {}
        for name, entry in stored.items():
            assert isinstance(entry, TensorStorageMetadata)
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise ValueError(f"parts of {name} are missing")
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    return State(step, tensors, path)


def read_sharded_checkpoint(path: Path) -> State:
    """Verify a checkpoint and read it as a whole, in one process."""
    described = describe_sharded_checkpoint(path)
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in described.tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as is meant here
        load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return State(described.step, tensors, path)


def load_into_shards(path: Path, targets: dict[str, Tensor], ranks: Ranks) -> None:
    """Read each process's parts of a verified checkpoint, of one process or of several. All processes call it.

    Args:
        targets: Tensors to overwrite, with the checkpoint's names and shapes.
    """
    if path.is_dir():
        with explain_lost_rank():
            load(targets, storage_reader=HuggingFaceStorageReader(str(path)), process_group=ranks.control)
        return
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, target in targets.items():
            value = file.get_tensor(name)
            if isinstance(target, DTensor):
                value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(value)


def _digests(files: Sequence[Path]) -> Mapping[str, str]:
    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip((file.name for file in files), pool.map(digest, files), strict=True))
