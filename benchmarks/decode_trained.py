"""Decoding the last token of a text with the heads of a trained language model: RUN STORE, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import command
from benchmarks.trained import run_on_text
from tra.bench import decode
from tra.bench.decode import (
    DecodeInputs,
    Shape,
    Timer,
    Times,
    compare_with_sdpa,
    sdpa_calls,
    time_calls,
    tra_calls,
)
from tra.bench.inputs import trained_inputs
from tra.bench.timing import gpu_environment
from tra.runs import RunFolder
from tra.text.task import Stream


def bench_decode_trained(
    device: torch.device,
    run: RunFolder,
    stream: Stream,
    progress: Callable[[str], None] = lambda _: None,
    contexts: Sequence[int] = (4096, 16_384, 65_536),
    dtype: torch.dtype = torch.bfloat16,
    timer: Timer = time_calls,
) -> dict[str, Any]:
    """Return a row per context that the text has, layer and contender: the last token, as each layer reads it."""
    rows: list[dict[str, Any]] = []
    checked: dict[str, Times] = {}
    for context in (context for context in contexts if context <= len(stream.tokens)):
        ids = torch.from_numpy(np.asarray(stream.tokens[:context]).astype(np.int64)).to(device)
        inputs = [x.detach() for x in trained_inputs(run, ids[None])]
        for layer in range(len(inputs[0])):
            query, key, value, log_forget = (x[layer : layer + 1] for x in inputs)
            shape = Shape(1, query.shape[1], key.shape[1], query.shape[3])
            if not checked:
                progress("correctness")
                checked[str(tuple(shape))] = decode.check(shape, device, dtype)
            windows = decode.windows_for(shape, context, device)
            key, value = (x.to(dtype).repeat(1, 1, windows, 1) for x in (key, value))
            at_end = DecodeInputs(
                query[:, :, -1:].to(dtype), key, value, log_forget[:, :, -1:], context, context, windows
            )
            facts = shape._asdict() | {"context": context, "windows": windows, "content": "trained"}
            progress(f"layer {layer}, {context:,} keys")
            for name, tolerance in (("tra", None), ("tra, full walk", 0.0)):
                named = {"contender": name, "layer": layer, **facts}
                rows.append(decode.measure_row(named, tra_calls(at_end, shape.bound, tolerance), windows, timer))
            if layer == 0:  # the others' times don't depend on contents
                rows += [
                    decode.measure_row({"contender": name, **facts}, call, windows, timer)
                    for name, call in sdpa_calls(at_end).items()
                ]
    compare_with_sdpa(rows)
    facts = {"run": run.path.name, "text": stream.name, "config": run.config().to_dict()}
    return {"environment": gpu_environment(device), "check": checked, **facts, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_on_text("decode_trained", __doc__, bench_decode_trained, arguments)


if __name__ == "__main__":
    command.run(main)
