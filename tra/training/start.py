"""Start a run, or go on with one: claim its folder, join its processes, and train it to the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tra.config import RunConfig
from tra.runs import RunFolder
from tra.training.ddp_and_fsdp import release
from tra.training.device import pick_device
from tra.training.distributed import join_processes, local_device
from tra.training.interruptions import explain_full_disk
from tra.training.trainer import Progress, Result, Trainer


def train(
    config: RunConfig | None,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    time_limit: float | None = None,
    changed_files: bool = False,
    device: torch.device | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Result:
    """Train a run to its end, or until it is told to stop.

    Args:
        config: The run; None takes the one in the folder, with `resume`.
        folder: The run's folder. One that exists is never touched without `resume` or `overwrite`.
        resume: Go on from the newest intact checkpoint, or start if there is none.
        time_limit: Seconds within which to stop, with a checkpoint written.
        changed_files: Resume although a file of the user has changed since the run began.
        progress: Called after every step.
    """
    started = time.monotonic()
    device = local_device(pick_device() if device is None else device)
    run = RunFolder(folder)

    def claim_folder() -> tuple[RunConfig, bool]:
        """Return the config, and whether the run is finished already."""
        if config is not None:  # checked before a folder is made, or an old one removed
            ranks.check(config.train)
            config.check_model()
            config.task.build().check_data()
        current = None if config is None else config.with_current_imports()
        chosen = claim.enter_context(run.claim(current, resume=resume, overwrite=overwrite))
        ranks.check(chosen.train)
        is_finished = resume and _has_final_weights(run, lambda text: progress(Progress(0, 0, message=text)))
        if not is_finished:
            changes = chosen.changed_imports()
            if changes and not changed_files:
                raise ValueError(
                    f"{run.path} can't go on: {changes[0]}; undo the change, start anew with --overwrite, "
                    "or go on all the same with --changed-files"
                )
            run.note_environment(device, ranks.world, changes)
        return chosen, is_finished

    with join_processes(device) as ranks, explain_full_disk(run), contextlib.ExitStack() as claim:
        chosen, is_finished = ranks.run_on_first(claim_folder)
        if is_finished:
            return Result(chosen.train.steps, "done")
        trainer = Trainer(chosen, run, device, progress if ranks.is_first else lambda _: None, ranks)
        try:
            return trainer.run_until(None if time_limit is None else started + time_limit)
        finally:
            release(trainer.loss)


def _has_final_weights(run: RunFolder, report: Callable[[str], None]) -> bool:
    """Return whether the run is finished. Damaged weights, or those of another model, are reported and don't count."""
    if not run.weights_file.is_file():
        return False
    try:
        run.read_weights()
    except ValueError as error:
        report(f"warning: {error}; training to the end again")
        return False
    return True
