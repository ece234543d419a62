"""Name a run's files, claim its folder, and load what they hold."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tra.runs.environment import environment
from tra.runs.extensions import ChangedFileWarning
from tra.runs.files import TEMPORARY, remove_stale_files, write_atomically
from tra.runs.former_names import rename_parameters
from tra.runs.locks import LOCK, folder_lock
from tra.runs.replacing import clear_folder_beside, clear_folders_beside, locked_folder_beside, replace_folder

if TYPE_CHECKING:
    import torch

    from tra.config import RunConfig
    from tra.model import Decoder

SHIPPED = Path(__file__).parent / "shipped"
"""Run folders that come with the package. They can be opened by name."""


class RunFolder:
    """The files of a run, and the ways to open and start one. Methods import torch when they need it.

    To use a trained run in Python:

        run = tra.RunFolder.open("runs/flipflop-quick-tra")  # or "flipflop-tra", which comes with the package
        model = run.load_model()  # a tra.Decoder, in evaluation mode
        task = run.config().task.build()

    A run with your own mechanism or task needs its file first: `tra.import_file("mine.py")`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.environment_file = path / "environment.json"
        self.metrics_file = path / "metrics.jsonl"
        self.evaluation_file = path / "eval.jsonl"
        self.perplexity_file = path / "perplexity.jsonl"
        self.diagnosis_file = path / "diagnose.jsonl"
        self.attention_file = path / "attend.npz"
        self.windows_file = path / "windows.json"
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

    @contextlib.contextmanager
    def claim(self, config: RunConfig | None, *, resume: bool, overwrite: bool) -> Iterator[RunConfig]:
        """Claim the folder for a new run, or on `resume` for the run that it holds, and yield the run's config.

        Within the context no other process writes to the folder, and what killed ones left is removed.
        """
        if resume and overwrite:
            raise ValueError("--resume and --overwrite exclude each other")
        full = self.path.resolve()
        clear_folder_beside(full, "overwriting")
        self._choose_config(config, resume, overwrite)  # refused now, before a folder is made
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(folder_lock(self.path))
            chosen = self._choose_config(config, resume, overwrite)
            if overwrite and self._is_used():
                with locked_folder_beside(full, "overwriting", "overwritten") as place:
                    new = place / "new"
                    new.mkdir()
                    RunFolder(new)._write_config(chosen)
                    replace_folder(new, full, place)
                    stack.close()  # the lock of the old folder; the new one is locked by its own
                    stack.enter_context(folder_lock(self.path))
            elif not self.config_file.is_file():
                self._write_config(chosen)
            stack.enter_context(self.lock())
            yield chosen

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing to the folder, and remove what killed ones left."""
        with folder_lock(self.path):
            remove_stale_files(self.path)
            if not self.checkpoint_folder.is_symlink():
                remove_stale_files(self.checkpoint_folder)
                clear_folders_beside(self.checkpoint_folder, "saving", "removing")
            yield

    def start(self, config: RunConfig | None, *, resume: bool, overwrite: bool) -> RunConfig:
        """Do what `claim` does, without keeping other processes away afterwards."""
        with self.claim(config, resume=resume, overwrite=overwrite) as chosen:
            return chosen

    def _choose_config(self, config: RunConfig | None, resume: bool, overwrite: bool) -> RunConfig:
        """Return the config of the run to start or resume. A ValueError if the folder may not be used for it."""
        from tra.config import differences

        has_config = self.config_file.is_file()
        if self._is_used() and overwrite and not has_config:
            raise ValueError(f"{self.path} is not a run folder, so it is not overwritten")
        if self._is_used() and not resume and not overwrite:
            raise ValueError(f"{self.path} exists already: use --resume to go on, --overwrite to start anew")
        if self.checkpoint_folder.is_symlink() and not overwrite:
            raise ValueError(f"{self.checkpoint_folder} is a link, which is not followed: move the whole run instead")
        if has_config and resume:
            stored = self.config()
            if config is not None and dataclasses.replace(config, imports=stored.imports) != stored:
                changed = ", ".join(differences(stored.to_dict(), config.to_dict()))
                raise ValueError(f"{self.path} was started with another config; it differs in {changed}")
            return stored
        if resume and (self.weights_file.exists() or any(self.checkpoint_folder.glob("step-*"))):
            raise ValueError(f"{self.path} has weights or checkpoints, but no config.json that says of which run")
        if config is None:
            raise ValueError(f"there is no run to resume in {self.path}")
        return config

    def _is_used(self) -> bool:
        """Return whether the folder holds anything but the lock and temporary files."""
        if not self.path.exists():
            return False
        return any(path.name != LOCK and not TEMPORARY.fullmatch(path.name) for path in self.path.iterdir())

    def _write_config(self, config: RunConfig) -> None:
        write_atomically(self.config_file, json.dumps(config.to_dict(), indent=2) + "\n")

    def sessions(self) -> list[dict[str, Any]]:
        """Return the sessions that environment.json holds, none if it doesn't exist. Damage is a ValueError."""
        if not self.environment_file.is_file():
            return []
        try:
            sessions: list[dict[str, Any]] = json.loads(self.environment_file.read_bytes())["sessions"]
            if isinstance(sessions, list) and all(isinstance(session, dict) for session in sessions):
                return sessions
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise ValueError(f"{self.environment_file} is damaged: it must hold a list of sessions")

    def note_environment(self, device: torch.device, processes: int = 1, changed_imports: Sequence[str] = ()) -> None:
        """Add this session to environment.json. A resumed run has several sessions."""
        sessions = self.sessions()
        session = environment(device) | ({"processes": processes} if processes > 1 else {})
        sessions.append(session | ({"changed_imports": list(changed_imports)} if changed_imports else {}))
        write_atomically(self.environment_file, json.dumps({"sessions": sessions}, indent=2) + "\n")

    def save_weights(self, model: Decoder | dict[str, torch.Tensor], step: int) -> None:
        """Write trained weights, given as a model or by name, and their step."""
        from tra.training.checkpoint import save_tensors

        tensors = model if isinstance(model, dict) else dict(model.state_dict())
        save_tensors(self.weights_file, tensors, {"step": str(step)})

    def read_weights(self) -> dict[str, torch.Tensor]:
        """Return the trained weights by today's names. A ValueError if they are damaged, or don't fit the config."""
        import torch

        from tra.model import Decoder
        from tra.training.checkpoint import DamagedError, fits, load_tensors

        try:
            tensors = rename_parameters(load_tensors(self.weights_file)[0])
        except DamagedError as error:
            raise ValueError(str(error)) from None
        with torch.device("meta"):  # names and shapes alone
            expected = Decoder(self.config().model).state_dict()
        if not fits(tensors, expected):
            raise ValueError(f"{self.weights_file} doesn't fit {self.config_file}: other weights, or another config")
        return tensors

    def load_model(self, device: torch.device | str = "cpu") -> Decoder:
        """Return the trained decoder, in float32 and evaluation mode.

        Warns if the file of the mechanism or of the task has changed since training.
        """
        from tra.model import Decoder

        config = self.config()
        for line in config.changed_imports():
            warnings.warn(f"{self.path}: {line}", ChangedFileWarning, stacklevel=2)
        if not self.weights_file.is_file():
            raise ValueError(f"{self.path} has no model.safetensors yet: the run hasn't ended")
        tensors = self.read_weights()
        model = Decoder(config.model)
        model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return model.to(device).eval()
