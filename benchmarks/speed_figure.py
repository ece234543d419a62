"""A figure of the operator's time over length, beside SDPA's, from FILE: a GPU's `tra bench op --json`.

With the heads of a trained model first, from a log of `python -m benchmarks.trained --json`.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks import command
from benchmarks.compare import read_result
from tra.report.names import COLOURS
from tra.report.style import SETTINGS, save

LINES = {
    # (contender, gates, content): label, colour, line and marker
    ("tra", "init", "trained"): ("TRA, a trained language model", "black", "-*"),
    ("SDPA flash", "init", "dense"): ("SDPA flash", "#D55E00", "-s"),
    ("SDPA cuDNN", "init", "dense"): ("SDPA cuDNN", "#E69F00", "--^"),
    ("tra, full walk", "init", "dense"): ("TRA, every key read", COLOURS["tra-threshold-only"], "-.D"),
    ("tra", "-0.01", "dense"): ("TRA, δ = −0.01", COLOURS["tra"], ":v"),
    ("tra", "-0.05", "dense"): ("TRA, δ = −0.05", COLOURS["tra"], "--P"),
    ("tra", "init", "dense"): ("TRA, gates at initialisation", COLOURS["tra"], "-o"),
}


def write_speed_figure(result: dict[str, Any], trained: Sequence[dict[str, Any]], out: Path) -> Path:
    """Draw microseconds per 1,000 tokens against length, forward and with backward, heads of 64.

    Args:
        trained: Rows of `benchmarks.trained`; without any the figure has no such line.
    """
    found = [row for row in result["rows"] if row.get("content") == "dense"] + list(trained)
    modes = ("forward", "forward and backward")
    with plt.rc_context(SETTINGS):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharex=True, sharey=True)
        for axis, mode in zip(axes, modes, strict=True):
            for (contender, gates, content), (label, colour, line) in LINES.items():
                wanted = {"contender": contender, "gates": gates, "content": content, "mode": mode, "width": 64}
                rows = [row for row in found if wanted.items() <= row.items() and "ms" in row]
                if not rows:
                    continue
                rows.sort(key=lambda row: row["length"])
                lengths = [row["length"] for row in rows]
                per_token = [1e6 * row["ms"] / (row["length"] * row["batch"]) for row in rows]
                axis.plot(lengths, per_token, line, color=colour, markersize=3.5, label=label)
            axis.set(xscale="log", yscale="log", title=mode, xlabel="tokens of a sequence")
            axis.set_xticks([2**n for n in (8, 10, 12, 14, 16, 18, 20)])
            axis.set_xticklabels(["256", "1k", "4k", "16k", "64k", "256k", "1M"])
            axis.minorticks_off()
        if not axes[0].lines:
            raise ValueError("the result has no rows of the kernels: it comes from a machine without a GPU")
        axes[0].set_ylabel("µs per 1,000 tokens")
        axes[0].legend(fontsize=8)
        device = result["environment"]["device"]
        figure.suptitle(f"Attention, 8 heads of 64, bfloat16, {device}", fontsize=10)
        figure.tight_layout()
        save(figure, out)
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m benchmarks.speed_figure", description=__doc__)
    parser.add_argument("file", type=Path, help="the result as JSON; the figure is drawn beside it")
    parser.add_argument("--trained", type=Path, metavar="LOG", help="a log of benchmarks.trained")
    options = parser.parse_args(arguments)
    trained = read_result(options.trained)["rows"] if options.trained else []
    print(write_speed_figure(read_result(options.file), trained, options.file.with_suffix(".png")))
    return 0


if __name__ == "__main__":
    command.run(main)
