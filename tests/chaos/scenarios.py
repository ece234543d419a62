"""The commands that are disturbed: what they find, what they must not harm, and what they leave."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.processes import SAVE_SHARDED, Fault, run
from tests.own import EXAMPLES

TRAIN = {"steps": 6, "batch_size": 4, "log_every": 2, "checkpoint_every": 2, "compile": "off"}
MODEL = {"vocab_size": 5, "d_model": 16, "n_layers": 1, "n_heads": 2, "dropout": 0.1}
FLIPFLOP = {
    "task": {"name": "flipflop", "arguments": {"length": 8}},
    "model": MODEL,
    "optim": {"lr": 1e-2},
    "train": TRAIN,
    "evaluate": {"examples": 8, "splits": ["iid", "sparse"]},
}
TEXT = FLIPFLOP | {
    "task": {"name": "text", "arguments": {"data": "corpus", "tokenizer": "bytes", "window": 16}},
    "model": MODEL | {"vocab_size": 320},
    "evaluate": {"windows": [16, 32]},
}
OWN_SETTINGS = {
    "task": {"name": "own_task.py:Reverse", "arguments": {"length": 4}},
    "model": MODEL | {"mechanism": "own_mechanism.py:Windowed", "arguments": {"window": 3}},
    "evaluate": {"examples": 8, "splits": ["2x"]},
}
GRID = """
from pathlib import Path
from tra.config import RunConfig
from tra.suite import Cell, Part

def grid():
    config = RunConfig.load(Path("tiny.json"))
    return {"part": Part([Cell(f"{m}-0", config.override([f"model.mechanism={m}"])) for m in ("tra", "rope")])}
"""
SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog goes on to sleep in the shade. "


@dataclass(frozen=True)
class Scenario:
    """A command, and what must hold of it whatever happens."""

    name: str
    command: str
    needs: dict[str, str] = field(default_factory=dict)
    """What lies in the folder: its name there -> its name among the templates."""
    again: str | None = None
    """What is run after a disturbance; the command itself by default."""
    refusal: str | None = None
    """Words with which the repetition may be refused, with status 2."""
    whole: tuple[str, ...] = ()
    """Files and folders that are, after any disturbance, as they were before or as they will be after."""
    versions: tuple[str, ...] = ()
    """Files (patterns) of which an undisturbed run makes several versions, and a disturbed one no others."""
    replaces: str | None = None
    """A folder that goes as a whole: it is never a mixture of old and new."""
    second: str = "refused"
    """What becomes of a second process meanwhile: it is "refused"; it may come "in turn" before the first has a lock;
    or both end well ("same")."""

    rival: str | None = None
    """What a second process runs, if not the same; what both have done is there in the end."""
    is_long: bool = False
    """Takes seconds, where others take a tenth of one."""

    @property
    def repeat(self) -> str:
        return self.command if self.again is None else self.again


RUN_FILES = (
    "*/model.safetensors", "*/config.json", "*/environment.json", "*/eval.jsonl", "*/diagnose.jsonl",
    "*/perplexity.jsonl", "*/checkpoints/step-*.safetensors", "*/attend.npz",
)  # fmt: skip

OWN_FILES = "--import own_mechanism.py --import own_task.py"
OWN = {name: name for name in ("own.json", "own_mechanism.py", "own_task.py")}

SCENARIOS = [
    Scenario(
        "train", "train --config tiny.json --out run", {"tiny.json": "tiny.json"},
        "train --config tiny.json --out run --resume", versions=RUN_FILES,
    ),
    Scenario("train-resume", "train --resume --out run", {"run": "half"}, versions=RUN_FILES, second="in turn"),
    Scenario(
        "train-overwrite", "train --config tiny.json --out run --overwrite", {"tiny.json": "tiny.json", "run": "old"},
        replaces="run", second="in turn",
    ),
    Scenario(
        "train-overwrite-resume", "train --config tiny.json --out run --overwrite",
        {"tiny.json": "tiny.json", "run": "old"}, "train --config tiny.json --out run --resume",
        refusal="was started with another config", replaces="run", second="in turn",
    ),
    Scenario(
        "train-text", "train --config text.json --out run", {"text.json": "text.json", "corpus": "corpus"},
        "train --config text.json --out run --resume", versions=RUN_FILES,
    ),
    Scenario("evaluate", "evaluate run", {"run": "trained"}, versions=RUN_FILES, second="same"),
    Scenario(
        "evaluate-rival", "evaluate run --splits iid", {"run": "trained"}, second="same",
        rival="evaluate run --splits sparse dense",
    ),
    Scenario(
        "evaluate-again", "evaluate run --diagnose --seed 1 --splits sparse iid", {"run": "evaluated"},
        versions=RUN_FILES, second="same",
    ),
    Scenario(
        "evaluate-text", "evaluate run --losses --maps 1 --windows 16 32 --overlap none half",
        {"run": "trained-text", "corpus": "corpus"}, versions=(*RUN_FILES, "*/*.npz"), second="same",
    ),
    Scenario("attend", "attend run", {"run": "trained"}, whole=("run/attend.npz", "run/attend.png"), second="same"),
    Scenario(
        "attend-again", "attend run --text w1i0i1r1w0r0", {"run": "attended"},
        whole=("run/attend.npz", "run/attend.png"), second="same",
    ),
    Scenario(
        "suite-run", "suite run grid.py:grid --out cells", {"tiny.json": "tiny.json", "grid.py": "grid.py"},
        "suite run grid.py:grid --out cells --retry", versions=tuple(f"cells/{file}" for file in RUN_FILES),
        second="same",
    ),
    Scenario(
        "suite-pack", "suite run grid.py:grid --out cells --pack results.tar.gz",
        {"tiny.json": "tiny.json", "grid.py": "grid.py", "cells": "cells"}, whole=("results.tar.gz",), second="same",
    ),
    Scenario(
        "suite-pack-again", "suite run grid.py:grid --out cells --pack results.tar.gz",
        {"tiny.json": "tiny.json", "grid.py": "grid.py", "cells": "cells", "results.tar.gz": "half.tar.gz"},
        whole=("results.tar.gz",), second="same",
    ),
    Scenario(
        "suite-merge", "suite merge results.tar.gz --out merged", {"results.tar.gz": "results.tar.gz"},
        whole=("merged/CELL0", "merged/CELL1"), second="same",
    ),
    Scenario(
        "suite-merge-again", "suite merge cells results.tar.gz --out merged",
        {"results.tar.gz": "results.tar.gz", "cells": "cells", "merged/CELL0": "cells/CELL0"},
        whole=("merged/CELL0", "merged/CELL1"), second="same",
    ),
    Scenario(
        "prepare", "prepare a.txt b.txt store --tokenizer bytes", {"a.txt": "a.txt", "b.txt": "b.txt"},
        whole=("store",),
    ),
    Scenario(
        "prepare-split", "prepare a.txt b.txt c.txt store --tokenizer bytes --hold-out 1",
        {"a.txt": "a.txt", "b.txt": "b.txt", "c.txt": "c.txt"}, whole=("store",),
    ),
    Scenario(
        "prepare-overwrite", "prepare a.txt b.txt store --tokenizer bytes --overwrite",
        {"a.txt": "a.txt", "b.txt": "b.txt", "store": "corpus"}, whole=("store",), second="in turn",
    ),
    Scenario(
        "train-own", f"train --config own.json --out run {OWN_FILES}", OWN,
        f"train --config own.json --out run {OWN_FILES} --resume", versions=RUN_FILES,
    ),
    Scenario(
        "train-resume-sharded", "train --resume --out run", {"run": "sharded"}, versions=RUN_FILES,
        whole=("run/checkpoints/step-00000004",), second="in turn",
    ),
    Scenario(
        "save-sharded", f"{SAVE_SHARDED} run 6", {"run": "sharded"}, second="in turn",
        whole=tuple(f"run/checkpoints/step-0000000{step}" for step in (2, 4, 6)),
    ),
    Scenario("calibrate", "calibrate run --sequences 2", {"run": "trained"}, whole=("run/windows.json",),
             second="same"),
    Scenario(
        "calibrate-again", "calibrate run corpus/valid --sequences 2 --length 32 --seed 1",
        {"run": "calibrated-text", "corpus": "corpus"}, whole=("run/windows.json",), second="same",
    ),
    Scenario("export-own", f"export run model {OWN_FILES}", OWN | {"run": "own"}, whole=("model",)),
    Scenario("export", "export run model", {"run": "trained"}, whole=("model",)),
    Scenario("export-overwrite", "export run model --overwrite", {"run": "trained", "model": "exported"},
             whole=("model",), second="in turn"),
    Scenario(
        "report", "report run --out out", {"run": "attended"},
        whole=("out/README.md", "out/training.png", "out/heads.png", "out/kept.png"), second="same", is_long=True,
    ),
    Scenario(
        "report-again", "report run --out out", {"run": "attended", "out": "report-old"},
        whole=("out/README.md", "out/training.png", "out/heads.png", "out/kept.png"), second="same", is_long=True,
    ),
    Scenario("report-page", "report run --out page.html", {"run": "attended"}, whole=("page.html",), second="same"),
    Scenario(
        "report-page-again", "report run --out page.html", {"run": "attended", "page.html": "page-old.html"},
        whole=("page.html",), second="same",
    ),
    Scenario(
        "report-index", "report --index results",
        {"results/one": "report-old", "results/index.json": "index.json", "results/README.md": "a.txt"},
        whole=("results/README.md",), second="same",
    ),
]  # fmt: skip


def make_templates(folder: Path) -> None:
    """Make what scenarios find."""
    for name, values in (("tiny.json", FLIPFLOP), ("text.json", TEXT)):
        (folder / name).write_text(json.dumps(values))
    (folder / "old.json").write_text(json.dumps(FLIPFLOP | {"train": TRAIN | {"seed": 1}}))
    (folder / "grid.py").write_text(GRID)
    (folder / "index.json").write_text(json.dumps({"one": "what lies there"}))
    for number, name in enumerate("abc"):
        (folder / f"{name}.txt").write_text(SENTENCE * (20 + number))
    for command in (
        "prepare c.txt b.txt a.txt corpus --tokenizer bytes --hold-out 1",
        "train --config tiny.json --out trained",
        "train --config old.json --out old",
        "evaluate old",
        "attend old",
        "train --config text.json --out trained-text",
        "export old exported",
        "suite run grid.py:grid --out cells",
        "suite run grid.py:grid --out cells --pack results.tar.gz",
    ):
        _must(command, folder)
    for name in ("own_mechanism.py", "own_task.py"):
        shutil.copyfile(EXAMPLES / name, folder / name)
    (folder / "own.json").write_text(json.dumps(FLIPFLOP | OWN_SETTINGS))
    _must(f"train --config own.json --out own {OWN_FILES}", folder)
    shutil.copytree(folder / "trained-text", folder / "calibrated-text")
    _must("calibrate calibrated-text --sequences 2 --length 16", folder)
    shutil.copytree(folder / "trained", folder / "evaluated")
    _must("evaluate evaluated --splits iid sparse dense", folder)
    shutil.copytree(folder / "trained", folder / "attended")
    for command in ("evaluate attended --diagnose", "attend attended", "report old --out report-old",
                    "report old --out page-old.html"):  # fmt: skip
        _must(command, folder)
    cells = sorted(path.name for path in (folder / "cells").iterdir() if (path / "config.json").is_file())
    shutil.copytree(folder / "cells" / cells[1], folder / "one" / cells[1])
    _must("suite merge one --out half-merged", folder)
    shutil.make_archive(str(folder / "half"), "gztar", folder / "half-merged")
    # a run that was killed before its weights were written
    trace = run("train --config tiny.json --out half", folder)
    shutil.rmtree(folder / "half")
    at = next(n for n, change in enumerate(trace.changes, 1) if "model.safetensors" in change)
    assert run("train --config tiny.json --out half", folder, Fault("kill", at)).status == -9
    assert not (folder / "half" / "model.safetensors").exists()
    # another, of several processes, that was killed at its fifth step
    shutil.copytree(folder / "half", folder / "sharded")
    checkpoints = folder / "sharded" / "checkpoints"
    _must(f"{SAVE_SHARDED} sharded 4", folder)
    (checkpoints / "step-00000004.safetensors").unlink()
    _must(f"{SAVE_SHARDED} sharded 2", folder)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000002", "step-00000004"]


def cell_names(templates: Path) -> list[str]:
    return sorted(path.name for path in (templates / "cells").iterdir() if (path / "config.json").is_file())


def lay_out(scenario: Scenario, templates: Path, folder: Path) -> None:
    """Fill a folder with what the scenario finds."""
    folder.mkdir()
    names = cell_names(templates)
    for target, source in scenario.needs.items():
        there, here = folder / _named(target, names), templates / _named(source, names)
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_dir():
            shutil.copytree(here, there)
        else:
            shutil.copy(here, there)


def _named(name: str, cells: list[str]) -> str:
    return name.replace("CELL0", cells[0]).replace("CELL1", cells[1])


def whole_names(scenario: Scenario, templates: Path) -> list[str]:
    names = cell_names(templates)
    return [_named(name, names) for name in scenario.whole]


def _must(command: str, folder: Path) -> None:
    outcome = run(command, folder)
    if outcome.status != 0:
        raise RuntimeError(f"tra {command}: status {outcome.status}\n{outcome.output}\n{outcome.errors}")
