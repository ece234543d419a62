"""Damaged run folders, as every verb that reads one meets them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.campaign import Examples, examine, shards
from tests.fuzz.sandbox import IMPORTS, Sandbox
from tests.fuzz.tampering import Tamper, tampers

FILES = ("config.json", "environment.json", "metrics.jsonl", "eval.jsonl", "diagnose.jsonl", "model.safetensors",
         "checkpoints", "checkpoints/step-00000001.safetensors", "attend.npz", "windows.json",
         ".eval.jsonl.1.tmp")  # fmt: skip
PART_FILES = ("config.json", "environment.json", "metrics.jsonl", "checkpoints",
              "checkpoints/step-00000001.safetensors", "eval.jsonl")  # fmt: skip
TEXT_FILES = (
    "config.json",
    "perplexity.jsonl",
    "metrics.jsonl",
    "model.safetensors",
    "environment.json",
    "windows.json",
)
MINE_FILES = ("config.json", "config.json", "config.json", "model.safetensors", "environment.json", "eval.jsonl")
SHARDED_FILES = (*PART_FILES[:4], *("checkpoints/step-00000001" + name for name in ("", "/manifest.json",
                 "/manifest.json",
                 "/shard-00001-model-00001-of-00001.safetensors", "/shard-00001-model-00001-of-00001.safetensors")),
                 "checkpoints/.step-00000001.saving", "checkpoints/.step-00000001.removing")  # fmt: skip
FILES_OF = {"run": FILES, "margin": FILES, "part": PART_FILES, "text": TEXT_FILES, "mine": MINE_FILES,
            "sharded": SHARDED_FILES}  # fmt: skip
COMMANDS = {
    "run": (
        ("train", "--resume", "--out", "run"),
        ("train", "--resume", "--preset", "demo", "task.arguments.length=8", "--out", "run"),
        ("evaluate", "run", "--splits", "iid"),
        ("evaluate", "run", "--splits", "iid", "--diagnose", "--json"),
        ("generate", "run", "--prompt", "w1i0i1r"),
        ("generate", "run", "--number", "2", "--json"),
        ("attend", "run", "--out", "new.svg"),
        ("report", "run", "other", "--out", "new.html"),
        ("report", "run", "other", "--out", "new.html"),
        ("report", "run", "other", "--out", "new"),
        ("calibrate", "run", "--sequences", "2"),
        ("generate", "run", "--memory", "calibrated", "--number", "2"),
        ("generate", "other", "--memory", "run/windows.json"),
        ("generate", "margin", "--memory", "run/windows.json", "--json"),
    ),
    "margin": (
        ("train", "--resume", "--out", "margin"),
        ("evaluate", "margin", "--splits", "iid", "--diagnose"),
        ("attend", "margin", "--out", "new.svg"),
        ("report", "run", "margin", "--out", "new.html"),
        ("report", "run", "margin", "--out", "new"),
        ("calibrate", "margin", "--sequences", "2"),
        ("generate", "margin", "--memory", "8"),
    ),
    "mine": (
        ("train", "--resume", "--out", "mine"),
        ("train", "--resume", "--out", "mine", *IMPORTS),
        ("train", "--config", "mine/config.json", "--out", "new"),
        ("train", "--config", "mine/config.json", "--out", "new", *IMPORTS),
        ("train", "--config", "mine/config.json", "--out", "new", *IMPORTS, "model.mechanism=rope"),
        ("evaluate", "mine", *IMPORTS),
        ("evaluate", "mine", "--import", "linked.py", "--import", "own_task.py"),
        ("evaluate", "mine"),
        ("generate", "mine", *IMPORTS, "--number", "2"),
        ("attend", "mine", *IMPORTS, "--out", "new.svg"),
        ("calibrate", "mine", *IMPORTS, "--sequences", "2"),
        ("report", "mine", "run", "--out", "new.html"),
        ("report", "mine", "run", "--out", "new"),
        ("suite", "merge", ".", "--out", "merged"),
    ),
    "sharded": (
        ("train", "--resume", "--out", "sharded"),
        ("train", "--resume", "--out", "sharded"),
        ("train", "--overwrite", "--preset", "demo", "task.arguments.length=8", "--out", "sharded"),
        ("evaluate", "sharded", "--splits", "iid"),
        ("report", "sharded", "--out", "new.html"),
    ),
    "part": (
        ("train", "--resume", "--out", "part"),
        ("train", "--resume", "--out", "part"),
        ("train", "--overwrite", "--preset", "demo", "task.arguments.length=8", "--out", "part"),
        ("evaluate", "part", "--splits", "iid"),
        ("report", "part", "--out", "new.html"),
    ),
    "text": (
        ("train", "--resume", "--out", "text"),
        ("evaluate", "text", "--windows", "8", "16", "--losses"),
        ("evaluate", "text", "--windows", "16", "--overlap", "half", "--json"),
        ("generate", "text", "--prompt", "It was", "--max-new-tokens", "4"),
        ("attend", "text", "--window", "8", "--out", "new.svg"),
        ("report", "text", "--out", "new.html"),
        ("report", "text", "--out", "new"),
        ("calibrate", "text", "--sequences", "2", "--length", "16"),
        ("generate", "text", "--memory", "calibrated", "--max-new-tokens", "20"),
        ("generate", "alice", "--memory", "text/windows.json", "--max-new-tokens", "4"),
    ),
}
CELL_COMMANDS = (
    ("suite", "status", "suite.py:mine", "--out", "cells"),
    ("suite", "table", "suite.py:mine", "--out", "cells"),
    ("suite", "table", "suite.py:mine", "--out", "cells", "--format", "json"),
    ("suite", "run", "suite.py:mine", "--out", "cells", "--device", "cpu"),
    ("suite", "run", "suite.py:mine", "--out", "cells", "--device", "cpu", "--retry"),
    ("suite", "merge", "cells", "cells.tar.gz", "--out", "merged"),
    ("suite", "merge", "cells.tar.gz", "--out", "cells"),
    ("suite", "status", "suite.py:ours", "--out", "ours"),
    ("suite", "table", "suite.py:ours", "--out", "ours"),
    ("suite", "run", "suite.py:ours", "--out", "ours", "--device", "cpu"),
    ("suite", "merge", "ours", "cells", "--out", "merged"),
    ("suite", "merge", "ours", "--import", "own_mechanism.py", "--out", "merged"),
)

Example = tuple[list[Tamper], tuple[str, ...]]


def damaged_runs() -> st.SearchStrategy[Example]:
    def of_run(name: str) -> st.SearchStrategy[Example]:
        files = (*(f"{name}/{file}" for file in FILES_OF[name]), f".{name}.overwriting")
        damage = st.lists(tampers(files), min_size=1, max_size=2)
        return st.tuples(damage, st.sampled_from(COMMANDS[name]))

    return st.sampled_from(("run", "run", "part", "text", "mine", "margin", "sharded")).flatmap(of_run)


@shards("run folders", quick=25, slow=150, share=0.1, time_share=0.2)
def test_run_folders(examples: Examples, sandbox: Sandbox) -> None:
    def attack(example: Example) -> None:
        damage, arguments = example
        told = "; ".join(map(str, damage))
        examine("run folders", sandbox, arguments, lambda place: [tamper.apply(place) for tamper in damage], told)

    examples.run(damaged_runs(), attack)


@shards("suite folders", quick=0, slow=50, share=0.04, time_share=0.08)
def test_suite_folders(examples: Examples, sandbox: Sandbox) -> None:
    cells = sorted(
        path.name for path in (sandbox.template / "place/cells").iterdir() if (path / "config.json").is_file()
    )
    names = ("config.json", "environment.json", "metrics.jsonl", "eval.jsonl", "diagnose.jsonl", "model.safetensors",
             "failed.json", "lock", "log.txt", "checkpoints")  # fmt: skip
    (own,) = (path.parent.name for path in (sandbox.template / "place/ours").glob("*/config.json"))
    files = (*(f"cells/{cell}/{name}" for cell in cells[:2] for name in names), "cells/.unpacked", "merged",
             *(f"ours/{own}/{name}" for name in names), f"ours/{own}/config.json", "cells/.merging-1")  # fmt: skip
    damaged = st.tuples(st.lists(tampers(files), min_size=1, max_size=2), st.sampled_from(CELL_COMMANDS))

    def attack(example: Example) -> None:
        damage, arguments = example
        told = "; ".join(map(str, damage))
        examine("suite folders", sandbox, arguments, lambda place: [tamper.apply(place) for tamper in damage], told)

    examples.run(damaged, attack)
