"""Run what needs a GPU, in one call: tests of the kernels, then measurements.

    python -m benchmarks.on_gpu --out results-of-today --budget 9m
    python -m benchmarks.on_gpu --out results-of-today --only tests op

Steps run one after the other, the most needed first. What each printed, NAME.out and NAME.log, is packed as
on_gpu.tar.gz after every step, so that a machine that is taken away loses one step. A step that doesn't end within
the budget is stopped; those after it are not begun.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks import command
from tra.cli.options import parse_duration

KERNEL_TESTS = ("tests/ops", "tests/attention", "--ignore=tests/ops/test_workarounds_gpu.py")
OTHER_TESTS = ("tests/training", "tests/bench", "tests/hub", "tests/test_serving.py", "tests/test_generation.py")


class Step(NamedTuple):
    """A command, by the arguments of Python, with variables that are set for it."""

    arguments: tuple[str, ...]
    variables: tuple[str, ...] = ()


def _pytest(*arguments: str) -> tuple[str, ...]:
    return "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments


STEPS = {
    "tests": Step(_pytest(*KERNEL_TESTS)),
    "other-tests": Step(_pytest("-m", "gpu", *OTHER_TESTS)),
    "workarounds": Step(_pytest("tests/ops/test_workarounds_gpu.py")),
    "direct-launch-tests": Step(_pytest("tests/ops/test_eager.py"), ("TRA_DIRECT_LAUNCH=1",)),
    "margin-speed": Step(("-m", "benchmarks.margin_speed", "--json")),
    "host": Step(("-m", "tra", "bench", "host", "--json")),
    "host-direct-call": Step(("-m", "tra", "bench", "host", "--json"), ("TRA_DIRECT_CALL=1",)),
    "host-direct-launch": Step(("-m", "tra", "bench", "host", "--json"), ("TRA_DIRECT_CALL=1", "TRA_DIRECT_LAUNCH=1")),
    "op": Step(("-m", "tra", "bench", "op", "--json")),
    "step": Step(("-m", "tra", "bench", "step", "--json")),
    "decode": Step(("-m", "tra", "bench", "decode", "--json")),
    "generate": Step(("-m", "tra", "bench", "generate", "--json")),
    "parallel-step": Step(("-m", "benchmarks.parallel_step", "--json")),
    "serving": Step(("-m", "benchmarks.serving", "--json")),
}


def run_steps(steps: dict[str, Step], out: Path, budget: float) -> dict[str, str]:
    """Run the steps within `budget` seconds, and return how each ended."""
    out.mkdir(parents=True, exist_ok=True)
    ended: dict[str, str] = {}
    deadline = time.monotonic() + budget
    with TemporaryDirectory() as folder:
        for name, step in steps.items():
            left = deadline - time.monotonic()
            ended[name] = "not begun" if left < 1 else _run(name, step, Path(folder), left)
            print(f"{name}: {ended[name]}", flush=True)
            _pack(Path(folder), out)
    return ended


def _run(name: str, step: Step, folder: Path, seconds: float) -> str:
    """Run a step, and return how it ended."""
    variables = os.environ | dict(variable.split("=") for variable in step.variables)
    began = time.monotonic()
    with (folder / f"{name}.out").open("wb") as printed, (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *step.arguments], stdout=printed, stderr=log, env=variables)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"stopped after {seconds:.0f} s"
    took = f"{time.monotonic() - began:.0f} s"
    return f"done in {took}" if status == 0 else f"failed with status {status} after {took}"


def _pack(folder: Path, out: Path) -> None:
    """Pack the files of all steps so far, replacing the archive in one step."""
    whole = out / "on_gpu.tar.gz"
    half = out / "on_gpu.tar.gz.half"
    with tarfile.open(half, "w:gz") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, file.name)
    half.replace(whole)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        prog="python -m benchmarks.on_gpu", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", default="1h", help="end within this time, such as 9m (default: 1h)")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    options = parser.parse_args(arguments)
    command.require_gpu(command.pick_device(None))
    ended = run_steps({name: STEPS[name] for name in options.only}, options.out, parse_duration(options.budget))
    return 0 if all(said.startswith("done") for said in ended.values()) else 1


if __name__ == "__main__":
    command.run(main)
