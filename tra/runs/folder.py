"""Name a run's files, claim its folder, and load what they hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tra.runs.environment import environment
from tra.runs.files import write_atomically
from tra.runs.json_files import read_sessions

if TYPE_CHECKING:
    import torch

    from tra.config import RunConfig
    from tra.model import Decoder

SHIPPED = Path(__file__).parent / "shipped"
"""Run folders that come with the package. They can be opened by name."""


class RunFolder:
    """The files of a run, and the ways to open and start one. Methods import torch when they need it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.environment_file = path / "environment.json"
        self.metrics_file = path / "metrics.jsonl"
        self.evaluation_file = path / "eval.jsonl"
        self.perplexity_file = path / "perplexity.jsonl"
        self.diagnosis_file = path / "diagnose.jsonl"
        self.attention_file = path / "attend.npz"
        self.weights_file = path / "model.safetensors"
        self.checkpoint_folder = path / "checkpoints"

    @classmethod
    def open(cls, name: str | Path) -> RunFolder:
        """Return an existing run, by its path or by the name of one that ships with the package."""
        for path in (Path(name), SHIPPED / name):
            if (path / "config.json").is_file():
                return cls(path)
        shipped = ", ".join(sorted(path.parent.name for path in SHIPPED.glob("*/config.json")))
        problem = "is not a run folder (no config.json in it)" if Path(name).exists() else "doesn't exist"
        raise ValueError(f"{name} {problem}; runs that ship with the package: {shipped}")

    def config(self) -> RunConfig:
        """Return the config that the run was started with."""
        from tra.config import RunConfig

        return RunConfig.load(self.config_file)

    def start(self, config: RunConfig | None, *, resume: bool, overwrite: bool) -> RunConfig:
        """Claim the folder for a new run, or on `resume` for the run that it holds, and return the run's config."""
        from tra.config import differences

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
        """Add this session to environment.json. A resumed run has several sessions."""
        sessions = read_sessions(self.environment_file)
        sessions.append(environment(device) | ({"processes": processes} if processes > 1 else {}))
        write_atomically(self.environment_file, json.dumps({"sessions": sessions}, indent=2) + "\n")

    def save_weights(self, model: Decoder, step: int) -> None:
        """Write the trained weights and the step that they are from."""
        from tra.training.checkpoint import save_tensors

        save_tensors(self.weights_file, dict(model.state_dict()), {"step": str(step)})

    def load_model(self, device: torch.device | str = "cpu") -> Decoder:
        """Return the trained decoder, in float32 and evaluation mode."""
        from tra.model import Decoder, rename_parameters
        from tra.training.checkpoint import DamagedError, load_tensors

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
