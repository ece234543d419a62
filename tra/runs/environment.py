"""Note what the numbers of a run depend on besides its config: versions, machine and command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tra

if TYPE_CHECKING:
    import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, commit, device and command of this process."""
    import torch

    on_gpu = device.type == "cuda"
    return {
        "tra": tra.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "cpu": cpu_name(),
        "platform": platform.platform(),
        "arguments": shlex.split(os.environ["TRA_ARGUMENTS"]) if "TRA_ARGUMENTS" in os.environ else sys.argv[1:],
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def cpu_name() -> str:
    """Return the CPU's model name, or its architecture if the name is unknown. Results on a CPU depend on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the package's checkout. TRA_COMMIT names it where the code was copied without one."""
    if "TRA_COMMIT" in os.environ:
        return os.environ["TRA_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
