"""`tra train`: train one run."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tra.cli.options import add_device, parse_duration

if TYPE_CHECKING:
    from tra.config import RunConfig

DESCRIPTION = """Train one run: a config becomes a folder with weights, metrics and checkpoints.
A run that was interrupted or killed goes on with --resume, as if nothing had
happened.

  tra train --preset flipflop-quick
  tra train --preset flipflop-quick model.mechanism=rope train.steps=500
  tra train --resume --out runs/flipflop-quick-tra
  tra train --preset flipflop-quick model.mechanism=mine.py:MyAttention

presets (-quick is a smaller, faster version):
  demo                      flip-flop on 64 symbols, a minute on a CPU
  flipflop, flipflop-quick  remember a bit through noise, as in the paper
  copy, copy-small, copy-exact, copy-quick
                            repeat the input
  induct, induct-small, induct-exact, induct-quick
                            find what followed a symbol
  instruct, instruct-quick  seven operations on a list
  latest, latest-quick      the latest value of a key, through noise
  mqar, mqar-quick          multi-query associative recall
  wikitext, wikitext-quick  language model; needs tra prepare
  text-demo                 language model of a text that comes with tra

Several processes share each batch and, with fsdp, the weights
(docs/many-gpus.md):
  torchrun --nproc-per-node 2 -m tra train --preset flipflop
  torchrun --nproc-per-node 2 -m tra train --preset copy train.parallel=fsdp"""

EXIT_STATUS = {"SIGINT": 130, "SIGTERM": 143}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "changes",
        nargs="*",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="changes to the config, such as train.steps=500 model.mechanism=rope; config.json of a run has all keys. "
        "A mechanism or task of your own is FILE.py:NAME, settings of it model.arguments.KEY or task.arguments.KEY",
    )
    parser.add_argument("--preset", metavar="NAME", help="the config of a preset, see above")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json, instead of a preset")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="the run's folder (default: runs/<preset>-<mechanism>)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in the folder, or start it if there is none"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete the run in the folder and start anew")
    parser.add_argument(
        "--changed-files",
        action="store_true",
        help="with --resume: go on though a file of your own has changed since the run began",
    )
    parser.add_argument(
        "--time-limit", metavar="9m", help="save a checkpoint and stop within this time: 90s, 9m or 1h30m"
    )
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    time_limit = None if options.time_limit is None else parse_duration(options.time_limit)
    from tra.cli.display import TrainingDisplay
    from tra.training import is_first, pick_device, train

    config = _config(options)
    folder = options.out
    if folder is None:
        assert config is not None
        task, mechanism = options.preset or config.task.name, config.model.mechanism
        folder = Path("runs") / "-".join(name.rpartition(":")[2] for name in (task, mechanism))
    device = pick_device(options.device)
    on_cpu = device.type == "cpu"
    with TrainingDisplay(str(folder), is_text=_is_text(config, folder), on_cpu=on_cpu) as display:
        result = train(
            config,
            folder,
            resume=options.resume,
            overwrite=options.overwrite,
            time_limit=time_limit,
            changed_files=options.changed_files,
            device=device,
            progress=display,
        )
    if not is_first():
        return 0
    imports = _import_options(config, folder)
    if result.done:
        print(f"done after {result.step:,} steps: {folder} (next: tra evaluate {folder}{imports})")
        return 0
    print(f"stopped at step {result.step:,} ({result.reason}); go on with: tra train --resume --out {folder}{imports}")
    return EXIT_STATUS.get(result.reason, 0)


def _config(options: argparse.Namespace) -> RunConfig | None:
    """Return the config that is asked for; None if it is the one in the folder to resume."""
    from tra.config import RunConfig
    from tra.presets import PRESETS, preset

    if options.preset is not None and options.config is not None:
        raise ValueError("give either --preset or --config")
    if options.preset is not None:
        return preset(options.preset).override(options.changes)
    if options.config is not None:
        return RunConfig.load(options.config).override(options.changes)
    if options.resume and options.out is not None:
        if options.changes:
            raise ValueError("changes to the config need a --preset or --config to apply to")
        return None
    raise ValueError(f"say what to train: --preset {' | '.join(PRESETS)}, --config FILE, or --resume --out FOLDER")


def _import_options(config: RunConfig | None, folder: Path) -> str:
    """Return the --import options that other commands need for the run's mechanism and task."""
    from tra.runs import RunFolder
    from tra.runs.extensions import imported_paths

    needed = imported_paths((config or RunFolder(folder).config()).imports)
    return "".join(f" --import {shlex.quote(os.path.relpath(path))}" for path in needed)


def _is_text(config: RunConfig | None, folder: Path) -> bool:
    from tra.runs import RunFolder
    from tra.text.task import Text

    run = RunFolder(folder)
    if config is None and run.config_file.is_file():
        config = run.config()
    return config is not None and config.task.name == Text.name
