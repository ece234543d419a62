"""`tra train`, `tra demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from tra import presets, training
from tra.cli.display import (
    TrainingDisplay,
)
from tra.cli.options import parse_duration
from tra.config import RunConfig
from tra.presets import PRESETS
from tra.training.distributed import is_first


def train(
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SECTION.KEY=VALUE ...")] = (),
    /,
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME", help=f"A run by name: {', '.join(PRESETS)}.")] = None,
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    time_limit: Annotated[str | None, tyro.conf.arg(metavar="9m")] = None,
    device: Annotated[str | None, tyro.conf.arg(metavar="DEVICE")] = None,
) -> int:
    """Train one run. A run is a folder; a killed one goes on with --resume as if nothing had happened.

    Over several processes: torchrun --nproc-per-node 2 -m tra train …; each takes its part of every batch.

    Args:
        overrides: Changes to the config, as in train.steps=500 model.mechanism=rope; config.json of a run has all keys.
        config: A config.json, instead of a preset.
        out: The run's folder; runs/<preset>-<mechanism> by default.
        resume: Go on with the run in the folder, or start it if there is none.
        overwrite: Throw away the run that is in the folder.
        time_limit: Checkpoint and stop in time, as in 9m, 90s or 1h30m.
        device: cpu or cuda; a GPU by default if there is one.
    """
    limit = None if time_limit is None else parse_duration(time_limit)
    if preset is not None and config is not None:
        raise ValueError("give either --preset or --config")
    run_config = (
        presets.preset(preset) if preset is not None else RunConfig.load(config) if config is not None else None
    )
    if run_config is None and not (resume and out is not None):
        raise ValueError(f"say what to train: --preset {' | '.join(PRESETS)}, --config FILE, or --resume --out FOLDER")
    if overrides:
        if run_config is None:
            raise ValueError("overrides need a --preset or --config to apply to")
        run_config = run_config.override(overrides)
    if out is None:
        assert run_config is not None
        out = Path("runs") / f"{preset or run_config.task.name}-{run_config.model.mechanism}"
    with TrainingDisplay(str(out)) as display:
        result = training.train(
            run_config,
            out,
            resume=resume,
            overwrite=overwrite,
            time_limit=limit,
            device=training.pick_device(device),
            progress=display,
        )
    if not is_first():
        return 0
    if result.done:
        print(f"done after {result.step:,} steps: {out} (next: tra evaluate {out})")
        return 0
    print(f"stopped at step {result.step:,} ({result.reason}); go on with: tra train --resume --out {out}")
    return {"SIGINT": 130, "SIGTERM": 143}.get(result.reason, 0)


def demo(out: Path = Path("demo"), seed: int = 0) -> int:
    """Train TRA, RoPE and FoT on a small task, and see who survives length. Takes minutes on a laptop.

    Args:
        out: Where runs and figure go. An earlier demo's are replaced, nothing else is touched.
        seed: Of initialisation and data.
    """
    from tra.cli.demo_run import run_demo

    return run_demo(out, seed)
