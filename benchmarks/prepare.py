"""Time and memory of `tra prepare`: the whole command, in a process of its own, on a short and a long text."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from tra.runs import environment
from tra.text import shipped_text

MEGABYTES = (25, 100)
JOBS = 2
_POLL_SECONDS = 0.02


def measure_prepare(text: Path, jobs: int, folder: Path) -> dict[str, Any]:
    """Run the command, and return its seconds and its peak memory."""
    command = [sys.executable, "-m", "tra", "prepare", str(text), str(folder), "--jobs", str(jobs), "--json"]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as wrong:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=said, stderr=wrong)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(_POLL_SECONDS)
        seconds = time.perf_counter() - begun
        if process.returncode:
            wrong.seek(0)
            raise ValueError(wrong.read().strip().removeprefix("tra: "))
        said.seek(0)
        (manifest,) = json.load(said).values()
    return {
        "megabytes": round(manifest["bytes"] / 1e6, 1),
        "jobs": jobs,
        "tokens": manifest["tokens"],
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(manifest["bytes"] / 1e6 / seconds, 2),
        "peak_mib": round(peak / 2**20),
    }


def bench_prepare(
    text: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
    megabytes: tuple[int, ...] = MEGABYTES,
) -> dict[str, Any]:
    """Measure the start of a text at several sizes; without one, of the text that ships with the package, repeated."""
    if not Path("/proc/self/status").exists():
        raise ValueError("this reads memory from /proc, which this system doesn't have")
    if text is not None and not text.is_file():
        raise ValueError(f"there is no file {text}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in megabytes:
            progress(f"{size} MB")
            cut = Path(folder) / f"{size}.txt"
            with cut.open("wb") as file:
                for line in _lines(text):
                    if file.tell() + len(line) > size * 10**6:
                        break
                    file.write(line)
            rows.append(measure_prepare(cut, JOBS, Path(folder) / str(size)))
    return {
        "environment": environment(torch.device("cpu")),
        "text": text.name if text else shipped_text().name,
        "rows": rows,
    }


def resident(pid: int) -> int:
    """Return the bytes of memory that a process holds; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _lines(text: Path | None) -> Iterator[bytes]:
    if text is not None:
        with text.open("rb") as file:
            yield from file
        return
    paragraphs = shipped_text().read_bytes().split(b"\n\n")
    generator = random.Random(0)
    while True:  # in another order and with other numbers each time, so that no cache holds all of it
        generator.shuffle(paragraphs)
        for paragraph in paragraphs:
            yield b"%d. %b\n\n" % (generator.randrange(10**6), paragraph)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("prepare", __doc__)
    parser.add_argument("text", type=Path, nargs="?", help="by default one made of the text that the package ships")
    options = parser.parse_args(arguments)
    command.show(bench_prepare(options.text, command.progress), options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
