"""A folder with one of everything that the command reads, its copies, and snapshots of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from tests.fuzz.command import run
from tests.own import EXAMPLES

TINY = (
    "model.d_model=8",
    "model.n_layers=1",
    "model.n_heads=1",
    "train.steps=2",
    "train.batch_size=2",
    "train.compile=off",
    "train.log_every=1",
    "train.checkpoint_every=1",
    "evaluate.examples=2",
    "evaluate.examples_of={}",
    "evaluate.windows=[8]",
    "evaluate.batch_tokens=64",
)
"""Changes that make a preset so small that a run takes a fraction of a second."""

SUITE = """
from tra.presets import preset
from tra.suite import Cell, Part

TINY = {tiny!r}

def mine():
    config = preset("demo").override([*TINY, "task.arguments.length=8"])
    cells = [
        Cell(f"{{name}}-{{seed}}", config.override([f"model.mechanism={{name}}", f"train.seed={{seed}}"]))
        for name in ("tra", "rope")
        for seed in (0, 1)
    ]
    return {{"flip": Part(cells)}}

def ours():
    own = ["model.mechanism=own_mechanism.py:Windowed", "model.arguments.window=3", "task.name=own_task.py:Reverse"]
    config = preset("copy-quick").override([*own, *TINY, "task.arguments.length=4", 'evaluate.splits=["2x"]'])
    return {{"flip": Part([Cell("own-0", config)])}}

def nothing():
    return {{}}

def wrong():
    return 3
"""

IMPORTS = ("--import", "own_mechanism.py", "--import", "own_task.py")
EVIL = "raise RuntimeError('imported, though nobody named it')\n"

Snapshot = dict[str, bytes | str]
"""Path below the sandbox -> content of a file, or what else it is."""


@contextlib.contextmanager
def tiny_presets() -> Iterator[None]:
    """Make every preset tiny for a while."""
    from tra.presets import PRESETS

    def shrunk(build: Callable[[], object]) -> Callable[[], object]:
        def small() -> object:
            config = build()
            arguments = config.task.arguments  # type: ignore[attr-defined]
            lengths = {name: 8 for name in ("length", "window") if name in arguments}
            task = dataclasses.replace(config.task, arguments=arguments | lengths)  # type: ignore[attr-defined]
            return dataclasses.replace(config, task=task).resolved().override(TINY)  # type: ignore[type-var]

        return small

    with mock.patch.dict(PRESETS, {name: shrunk(build) for name, build in PRESETS.items()}):
        yield


class Sandbox:
    """Copies of a template in which commands may do what they like: `place` is where they run."""

    def __init__(self, with_exports: bool = False) -> None:
        base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
        self.base = Path(tempfile.mkdtemp(prefix="tra-fuzz-", dir=base))
        self.template = self.base / "template"
        self.root = self.base / "copy"
        self.place = self.root / "place"
        _make(self.template)
        if with_exports:
            for name, model, *imports in (("run", "model"), ("text", "language"), ("mine", "own", *IMPORTS)):
                outcome = run(("export", name, model, *imports), self.template / "place", 100.0)
                assert outcome.status == 0, outcome.stderr + outcome.trace
        self.is_fresh = False

    def fresh(self) -> Path:
        """Put the copy back into its first state; return where to run."""
        if not self.is_fresh:
            shutil.rmtree(self.root, ignore_errors=True)
            shutil.copytree(self.template, self.root, symlinks=True)
            self.is_fresh = True
        return self.place

    def snapshot(self) -> Snapshot:
        return snapshot(self.root)

    def close(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)


def snapshot(root: Path) -> Snapshot:
    found: Snapshot = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)  # noqa: PTH118 - names here may be hostile
            mode = os.lstat(path).st_mode
            content: bytes | str = "folder"
            if stat.S_ISLNK(mode):
                content = f"link to {os.readlink(path)}"  # noqa: PTH115
            elif stat.S_ISREG(mode):
                with open(path, "rb") as file:  # noqa: PTH123
                    content = file.read()
            elif not stat.S_ISDIR(mode):
                content = "special"
            found[os.path.relpath(path, root)] = content
    return found


def _make(root: Path) -> None:
    place, beside = root / "place", root / "beside"
    place.mkdir(parents=True)
    beside.mkdir()
    (root / "apart" / "folder").mkdir(parents=True)
    (root / "apart" / "folder" / "kept.txt").write_text("not to be touched\n")
    (beside / "sentinel.txt").write_text("not to be touched\n")
    (root / "sentinel.txt").write_text("nor this\n")
    (place / "a.txt").write_text("It was the best of times, it was the worst of times. " * 8)
    (place / "b.jsonl").write_text(
        '{"title": "one", "text": "first text"}\n{"text": "the second text, somewhat longer than the first one"}\n'
    )
    (place / "bad.json").write_text('{"task": ')
    (place / "notes.md").write_text("notes\n")
    (place / "suite.py").write_text(SUITE.format(tiny=TINY))
    for name in ("own_mechanism.py", "own_task.py"):
        shutil.copyfile(EXAMPLES / name, place / name)
    (place / "linked.py").symlink_to("own_mechanism.py")
    (place / "renamed.py").symlink_to("a.txt")
    (place / "folder.py").mkdir()
    for name in ("empty", "with space", "ünïcode"):
        (place / name).mkdir()
    (place / "with space" / "kept.txt").write_text("kept\n")

    def tra(*arguments: str) -> None:
        outcome = run(arguments, place, 100.0)
        assert (outcome.status, outcome.failures) == (0, []), (arguments, outcome.stderr, outcome.trace)

    with tiny_presets():
        small = ("train", "--preset", "demo", "task.arguments.length=8", "--device", "cpu")
        tra("prepare", "a.txt", "store", "--tokenizer", "bytes")
        tra("prepare", "a.txt", "b.jsonl", "stores", "--tokenizer", "bytes", "--hold-out", "1")
        text = ("train", "--preset", "text-demo", "task.arguments.window=8", "task.arguments.data=stores")
        tra(*text, "--out", "text", "--device", "cpu")
        tra("train", "--preset", "text-demo", "--out", "alice", "--device", "cpu")
        tra("evaluate", "text", "--windows", "8", "16", "--device", "cpu")
        tra(*small, "--out", "run")
        tra(*small, "--out", "other", "model.mechanism=rope", "model.d_model=16", "train.steps=3")
        for name in ("run", "other"):
            tra("evaluate", name, "--diagnose", "--json", "--splits", "iid", "4x")
        tra("attend", "run", "--out", "attend.svg")
        own = ("model.mechanism=own_mechanism.py:Windowed", "model.arguments.window=3", "task.name=own_task.py:Reverse")
        tra(
            "train",
            "--preset",
            "copy-quick",
            *own,
            "task.arguments.length=4",
            'evaluate.splits=["2x"]',
            "--out",
            "mine",
        )
        tra("evaluate", "mine", *IMPORTS)
        tra(*small, "--out", "margin", "model.margin=inf", "model.threshold=-1")
        tra("evaluate", "margin", "--diagnose", "--splits", "iid")
        tra("attend", "margin", "--out", "new.svg")
        (place / "new.svg").unlink()
        tra("calibrate", "run", "--sequences", "2")
        tra("calibrate", "text", "--sequences", "2", "--length", "16")
        tra("suite", "run", "suite.py:ours", "--out", "ours", "--device", "cpu")
        tra("suite", "run", "suite.py:mine", "--out", "cells", "--pack", "cells.tar.gz", "--device", "cpu")
    shutil.copyfile(place / "text/perplexity.jsonl", place / "alice/perplexity.jsonl")
    shutil.copytree(place / "run", place / "part")
    for name in ("model.safetensors", "eval.jsonl", "diagnose.jsonl", "attend.npz", "windows.json"):
        (place / "part" / name).unlink()
    rows = (place / "part/metrics.jsonl").read_text().splitlines()
    (place / "part/metrics.jsonl").write_text(rows[0] + "\n")
    shutil.copytree(place / "part", place / "sharded")
    _shard(place / "sharded")
    for folder in (place, place / "run", place / "mine", place / "cells", beside):
        (folder / "evil.py").write_text(EVIL)
    (place / "mine" / "own_mechanism.py").write_text(EVIL)
    package = place / "evil-1.0.dist-info"  # as a folder of runs may have one beside them
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[tra.mechanisms]\nevil = evil:Evil\n[tra.tasks]\nevil = evil:Evil\n")
    cells = sorted((place / "cells").glob("*/config.json"))
    (cells[0].parent / "failed.json").write_text(json.dumps({"status": 1, "last_lines": "it failed"}) + "\n")
    (cells[0].parent / "eval.jsonl").unlink()
    shutil.copytree(place / "run", beside / "run")
    shutil.copyfile(place / "run/config.json", place / "config.json")
    (place / "link").symlink_to("run")
    (place / "dangling").symlink_to("nowhere")


def _shard(run: Path) -> None:
    """Put folders of sharded weights in the place of a run's checkpoints."""
    from tra.training.checkpoint import checkpoints, read_checkpoint
    from tra.training.distributed import Ranks
    from tra.training.sharded_checkpoint import save_sharded_checkpoint

    for path in checkpoints(run / "checkpoints"):
        state = read_checkpoint(path)
        path.unlink()
        save_sharded_checkpoint(run / "checkpoints", state.step, state.tensors, Ranks())
