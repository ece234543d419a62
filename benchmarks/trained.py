"""The kernels on the queries, keys and gates of a trained language model reading a text: RUN STORE, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import command
from tra.bench.inputs import Case, trained_inputs
from tra.bench.kernels import check, compare_with_flash, measure_case
from tra.bench.timing import gpu_environment
from tra.runs import RunFolder
from tra.text import TokenStore
from tra.text.task import Stream

Bench = Callable[[torch.device, RunFolder, Stream, Callable[[str], None]], dict[str, Any]]


def bench_trained(
    device: torch.device,
    run: RunFolder,
    stream: Stream,
    progress: Callable[[str], None] = lambda _: None,
    lengths: Sequence[int] = (4096, 16_384, 65_536),
) -> dict[str, Any]:
    """Return a row per length that the text has, contender and mode."""
    checked = {str(width): check(width, device) for width in (64, 128)}
    rows: list[dict[str, Any]] = []
    for length in (length for length in lengths if length <= len(stream.tokens)):
        ids = torch.from_numpy(np.asarray(stream.tokens[:length]).astype(np.int64)).to(device)
        inputs = trained_inputs(run, ids[None])
        rows += measure_case(Case(inputs.query.shape[-1], length, "init", "trained"), inputs, progress)
    compare_with_flash(rows)
    facts = {"run": run.path.name, "text": stream.name, "config": run.config().to_dict()}
    return {"environment": gpu_environment(device), "check": checked, **facts, "rows": rows}


def run_on_text(name: str, description: str | None, bench: Bench, arguments: Sequence[str] | None) -> int:
    """Run a benchmark on the GPU, with the run and the text that its command line names."""
    parser = command.parser(name, description)
    parser.add_argument("run", type=Path)
    parser.add_argument("store", type=Path)
    options = parser.parse_args(arguments)
    device = command.require_gpu(command.pick_device(options.device))
    run, stream = RunFolder.open(options.run), Stream.of_store(TokenStore.open(options.store))
    command.show(bench(device, run, stream, command.progress), options.json)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_on_text("trained", __doc__, bench_trained, arguments)


if __name__ == "__main__":
    command.run(main)
