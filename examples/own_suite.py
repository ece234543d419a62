"""A suite of your own: TRA and your own mechanism on your own task, two seeds each.

tra suite run examples/own_suite.py:grid
tra suite table examples/own_suite.py:grid
"""

from __future__ import annotations

from pathlib import Path

from tra.presets import preset
from tra.suite import Cell, Part, Suite

HERE = Path(__file__).parent
CHANGES = [f"task.name={HERE}/own_task.py:Reverse", "model.d_model=32", "train.steps=200", "train.log_every=20"]


def grid() -> Suite:
    """Return one table."""
    mechanisms = {"tra": "tra", "windowed": f"{HERE}/own_mechanism.py:Windowed"}
    demo = preset("copy-quick").override([*CHANGES, "evaluate.examples_of={}"])
    cells = [
        Cell(f"{label}-{seed}", demo.override([f"model.mechanism={name}", f"train.seed={seed}"]))
        for label, name in mechanisms.items()
        for seed in (0, 1)
    ]
    return {"reverse": Part(cells)}
