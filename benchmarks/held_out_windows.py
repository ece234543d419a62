"""Whether calibrated windows drop as much of a text that they were not measured on: STORE RUN, after tra calibrate.

For each head: the mean weight that its window drops, with a 95 % interval, as calibrated and on the text, and the share
of queries that drop more than the tolerance. Heads for which no window was enough are left out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from tra.evaluation.calibration import measure_dropped_weight, text_sequences
from tra.runs import RunFolder, environment, read_windows
from tra.text import VOCABULARIES, TokenStore
from tra.text.task import Stream


def bench_held_out_windows(
    run: RunFolder,
    stream: Stream,
    *,
    sequences: int = 16,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return a row per head that has a window, on sequences as long as those of the calibration."""
    calibration = read_windows(run.windows_file, run)
    known = min(run.config().model.vocab_size, VOCABULARIES[stream.tokenizer])
    chosen = text_sequences(stream, known, calibration.length, sequences, seed)
    windows = sorted({window for heads in calibration.windows for window in heads})

    def show(done: int) -> None:
        progress(f"{done} of {len(chosen.tokens)} sequences")

    found = measure_dropped_weight(run.load_model(), chosen.tokens, windows, calibration.tolerance, show)
    mean, beyond, rows = found.mean(), found.share_beyond(), []
    for layer, heads in enumerate(calibration.windows):
        for head, window in enumerate(heads):
            calibrated = calibration.dropped[layer][head]
            if calibrated is None:
                continue
            place = layer, head, windows.index(window)
            low, high = found.interval(layer, head, window)
            rows.append({
                "layer": layer, "head": head, "window": window,
                "calibrated": calibrated, "held_out": [float(f"{x:.4g}") for x in (mean[place], low, high)],
                "times": round(mean[place] / calibrated[0], 3) if calibrated[0] else math.nan,
                "within": bool(calibrated[1] <= mean[place] <= calibrated[2]),
                "intervals_meet": bool(low <= calibrated[2] and high >= calibrated[1]),
                "beyond": float(f"{beyond[place]:.4g}"), "beyond_calibrated": calibration.beyond[layer][head],
            })  # fmt: skip
    facts = {
        "run": run.path.name, "trained": run.sessions(), "calibrated_on": calibration.text, "text": chosen.text,
        "tolerance": calibration.tolerance, "statistic": calibration.statistic, "length": calibration.length,
        "sequences": [calibration.sequences, len(chosen.tokens)], "seed": seed,
    }  # fmt: skip
    return facts | {"rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("held_out_windows", __doc__)
    parser.add_argument("store", type=Path, metavar="STORE")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of sequences")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    found = bench_held_out_windows(
        RunFolder.open(options.run),
        Stream.of_store(TokenStore.open(options.store)),
        sequences=options.sequences,
        seed=options.seed,
        progress=lambda done: print(done, file=sys.stderr),
    )
    result = {"environment": environment(command.pick_device("cpu"))} | found
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    command.show(result, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
