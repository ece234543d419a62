"""`tra bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from tra import unknown_name
from tra.attention import MECHANISMS
from tra.cli.options import Json
from tra.runs.folder import RunFolder
from tra.text import TokenStore
from tra.text.task import Stream
from tra.training import trainer as training


def bench(
    what: tyro.conf.Positional[
        Literal[
            "op", "trained", "decode", "generate", "sampling", "step", "cost", "cells", "prepare", "compare", "figure"
        ]
    ] = "op",
    /,
    files: tyro.conf.Positional[tuple[Path, ...]] = (),
    only: tuple[str, ...] = (),
    device: str | None = None,
    as_json: Json = False,
) -> int:
    """Measure speed and memory on this machine.

    Args:
        what: "op" is the operator: on a GPU the kernels against others' attention, on a CPU its implementations;
            "trained RUN STORE" the kernels on what a trained language model makes of a text, on a GPU;
            "decode [RUN STORE]" is one token over a long context, on a GPU, random or as such a model reads a text;
            "generate" is generation from end to end, prompt and all, with a CUDA graph and without, TRA and RoPE;
            "sampling" is what it adds to a training step; "step" is a whole training step of every mechanism, as a
            ratio to RoPE's; "cost" the same for the shapes of the paper's cost table, TRA and RoPE;
            "cells" is how many cells of a suite an hour sees, by how many run side by side;
            "prepare [TEXT]" makes token stores of 25 and 100 MB of text. "compare OLD NEW" sets two results side by
            side and fails where the new one is 10 % worse; "figure FILE" draws a GPU's "op" beside the file.
        files: Results as JSON, of "compare" and "figure"; of "prepare" a text, by default one made up; of "trained" and
            "decode" a run and a token store.
        only: Of "step", "cost" and "generate": these mechanisms, in place of all those named above.
        device: cpu or cuda; a GPU by default if there is one.
        as_json: Print JSON for scripts instead of a table.
    """
    if what == "compare":
        return _bench_compare(files)
    if what == "figure":
        return _bench_figure(files)
    if (what == "trained" and len(files) != 2) or (what == "decode" and len(files) not in (0, 2)):
        raise ValueError(f"bench {what} takes a run and a token store, got {len(files)} names")
    if what not in ("trained", "decode") and len(files) > (what == "prepare"):
        raise ValueError(f"bench {what} takes {'one text' if what == 'prepare' else 'no files'}, got {files[-1]}")
    for mechanism in only:
        if mechanism not in MECHANISMS:
            raise ValueError(unknown_name("mechanism", mechanism, MECHANISMS))
    from benchmarks.cells import bench_cells
    from benchmarks.decode_trained import bench_decode_trained
    from benchmarks.prepare import bench_prepare
    from benchmarks.sampling import bench_sampling
    from benchmarks.trained import bench_trained
    from tra.bench.decode import bench_decode
    from tra.bench.generate import bench_generate
    from tra.bench.kernels import bench_kernels
    from tra.bench.op import bench_op
    from tra.bench.step import COST_SHAPES, bench_step

    with Console(stderr=True).status("measuring") as status:

        def progress(text: str) -> None:
            status.update(f"measuring {text}")

        chosen = training.pick_device(device)
        if what == "op":
            result = bench_kernels(chosen, progress) if chosen.type == "cuda" else bench_op(progress)
        elif what in ("trained", "decode"):
            if chosen.type != "cuda":
                raise ValueError(f"bench {what} measures the kernels, which need a GPU")
            if not files:
                result = bench_decode(chosen, progress)
            else:
                run, stream = RunFolder.open(files[0]), Stream.of_store(TokenStore.open(files[1]))
                on_text = bench_trained if what == "trained" else bench_decode_trained
                result = on_text(chosen, run, stream, progress)
        elif what == "generate":
            result = bench_generate(chosen, only or ("tra", "rope"), progress=progress)
        elif what == "sampling":
            result = bench_sampling(chosen, progress)
        elif what == "cells":
            result = bench_cells(str(chosen), progress=progress)
        elif what == "prepare":
            result = bench_prepare(files[0] if files else None, progress)
        elif what == "cost":
            result = bench_step(str(chosen), only or ("tra", "rope"), COST_SHAPES, progress)
        else:
            result = bench_step(str(chosen), only or tuple(MECHANISMS), progress=progress)
    if as_json:
        print(json.dumps(result, indent=2))
        return 0
    rows = result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(name.replace("_", " ") for name in names))
    for row in rows:
        values = [row.get(name, "") for name in names]
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in values))
    Console().print(table)
    if what == "op" and chosen.type == "cpu":
        short, long = rows[1]["length"], rows[2]["length"]
        print(f"at {short:,} tokens blockwise is {result['speedup']:.1f} times as fast as reference, both ways")
        print(f"at {long:,} tokens it takes {result['memory_ratio']:.2f} of the memory of one head's T × T map")
    return 0


def _bench_compare(files: tuple[Path, ...]) -> int:
    from benchmarks.compare import compare, read_result

    if len(files) != 2:
        raise ValueError(f"bench compare takes two files, OLD and NEW, got {len(files)}")
    changes = compare(*(read_result(file) for file in files))
    table = Table("what", "measure", "old", "new", "new / old")
    for change in changes:
        colour = "red" if change.is_worse else "green" if change.ratio < 1 / 1.1 else ""
        numbers = (f"{change.old:,.4g}", f"{change.new:,.4g}", f"{change.ratio:.3f}")
        table.add_row(change.what, change.measure, *numbers, style=colour)
    Console().print(table)
    worse = sum(change.is_worse for change in changes)
    print(f"{worse} of {len(changes)} are more than 10 % worse")
    return 1 if worse else 0


def _bench_figure(files: tuple[Path, ...]) -> int:
    from benchmarks.compare import read_result
    from benchmarks.speed_figure import write_speed_figure

    if len(files) != 1:
        raise ValueError(f"bench figure takes one file, got {len(files)}")
    print(write_speed_figure(read_result(files[0]), files[0].with_suffix(".png")))
    return 0
