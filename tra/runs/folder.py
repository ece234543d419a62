"""A run is a folder: config, environment, metrics, evaluations, checkpoints, weights."""

from __future__ import annotations

import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tra
from tra.config import RunConfig, differences
from tra.model import Decoder, rename_parameters
from tra.runs.rows import read_rows
from tra.training.checkpoint import DamagedError, load_tensors, save_tensors, write_atomically

SHIPPED = Path(__file__).parent / "shipped"
"""Run folders that come with the package, usable by name."""


class RunFolder:
    """Where a run keeps its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.environment_file = path / "environment.json"
        self.metrics_file = path / "metrics.jsonl"
        self.evaluation_file = path / "eval.jsonl"
        self.perplexity_file = path / "perplexity.jsonl"
        self.diagnosis_file = path / "diagnose.jsonl"
        self.weights_file = path / "model.safetensors"
        self.checkpoint_folder = path / "checkpoints"

    @classmethod
    def open(cls, name: str | Path) -> RunFolder:
        """An existing run, by its path or by the name of one that ships with the package."""
        for path in (Path(name), SHIPPED / name):
            if (path / "config.json").is_file():
                return cls(path)
        shipped = ", ".join(sorted(path.parent.name for path in SHIPPED.glob("*/config.json")))
        what = "is not a run folder (no config.json in it)" if Path(name).exists() else "doesn't exist"
        raise ValueError(f"{name} {what}; runs that ship with the package: {shipped}")

    def config(self) -> RunConfig:
        return RunConfig.load(self.config_file)

    def start(self, config: RunConfig | None, *, resume: bool, overwrite: bool) -> RunConfig:
        """Claim the folder for a run: a new one, or on `resume` the one that is there."""
        if resume and overwrite:
            raise ValueError("--resume and --overwrite exclude each other")
        exists = self.path.exists() and any(self.path.iterdir())
        if exists and overwrite:
            if not self.config_file.is_file():
                raise ValueError(f"{self.path} is not a run folder, so it is not overwritten")
            shutil.rmtree(self.path)
            exists = False
        if exists and not resume:
            raise ValueError(f"{self.path} exists already: use --resume to go on, --overwrite to start anew")
        if exists and self.config_file.is_file():
            stored = self.config()
            if config is not None and config != stored:
                changed = ", ".join(differences(stored.to_dict(), config.to_dict()))
                raise ValueError(f"{self.path} was started with another config; it differs in {changed}")
            return stored
        if config is None:
            raise ValueError(f"there is no run to resume in {self.path}")
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.config_file, json.dumps(config.to_dict(), indent=2) + "\n")
        return config

    def note_environment(self, device: torch.device, processes: int = 1) -> None:
        """Add this session to environment.json: a resumed run has several."""
        sessions = []
        if self.environment_file.is_file():
            sessions = json.loads(self.environment_file.read_text())["sessions"]
        sessions.append(environment(device) | ({"processes": processes} if processes > 1 else {}))
        write_atomically(self.environment_file, json.dumps({"sessions": sessions}, indent=2) + "\n")

    def save_weights(self, model: Decoder, step: int) -> None:
        save_tensors(self.weights_file, dict(model.state_dict()), {"step": str(step)})

    def load_model(self, device: torch.device | str = "cpu") -> Decoder:
        """The trained decoder, in float32 and evaluation mode."""
        config = self.config()
        if not self.weights_file.is_file():
            raise ValueError(f"{self.path} has no model.safetensors yet: the run hasn't ended")
        try:
            tensors, _ = load_tensors(self.weights_file)
        except DamagedError as error:
            raise ValueError(str(error)) from None
        model = Decoder(config.model)
        model.load_state_dict({name: tensor.float() for name, tensor in rename_parameters(tensors).items()})
        return model.to(device).eval()


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines, all of them or, if something happens, the file as it was."""
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))


def put_row(file: Path, row: dict[str, Any], key: tuple[str, ...]) -> None:
    """Add a row to a file of JSON lines, in place of an earlier one that has the same values under `key`."""
    others = [other for other in read_rows(file) if any(other[name] != row[name] for name in key)]
    write_rows(file, [*others, row])


def write_arrays(file: Path, arrays: dict[str, Any]) -> None:
    """A compressed .npz, all of it or nothing. Equal arrays give equal bytes."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(file, content.getvalue())


def environment(device: torch.device) -> dict[str, Any]:
    """What a number depends on besides its config."""
    on_gpu = device.type == "cuda"
    return {
        "tra": tra.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "platform": platform.platform(),
        "arguments": shlex.split(os.environ["TRA_ARGUMENTS"]) if "TRA_ARGUMENTS" in os.environ else sys.argv[1:],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str | None:
    """Of the package's own checkout; where the code travelled without one, TRA_COMMIT may name it."""
    if "TRA_COMMIT" in os.environ:
        return os.environ["TRA_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
