"""Runs whose rows processes share: `torchrun -m tests.training.context_cases FOLDER`. See `parallel_cases`."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file

from tests.training.parallel_cases import (
    CLIPPED,
    COPY,
    CPU,
    PIECES,
    TEXT,
    Case,
    checkpoint_steps,
    run_config,
    train_case,
)
from tra.ops.context import schedule
from tra.training.distributed import join_processes

SEGMENT = 4
"""Keys of the smallest segment: rows are short."""

CASES = {
    "padded rows": Case(COPY),
    "text, margin": Case((*TEXT, "model.margin=2"), large_vocabulary=True),
    "checkpointed, clipped, in pieces": Case((*COPY, PIECES, CLIPPED, "train.checkpoint_activations=true")),
}
"""Rows of odd lengths; of text, with several documents."""

SHARING = {2: (2,), 4: (2, 4)}
"""Processes that share a row, by processes of the run."""

RESUMED = Case((*COPY, "train.context_parallel=4"))


def main(folder: Path) -> None:
    schedule.SMALLEST_SEGMENT = SEGMENT
    with join_processes(CPU) as ranks:
        for engine in ("ddp", "fsdp"):
            for sharing in SHARING[ranks.world]:
                for name, case in CASES.items():
                    changes = (f"train.parallel={engine}", f"train.context_parallel={sharing}")
                    found = train_case(case, run_config(case, folder / "store", *changes), folder / "no-run", ranks)
                    if ranks.is_first:
                        save_file(found, folder / f"{engine}, {sharing} of {ranks.world}, {name}.safetensors")
        checkpoint_steps(ranks, folder, "down", 2, RESUMED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
