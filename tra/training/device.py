"""The device of a run, and the precision it computes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def pick_device(device: str | None = None) -> torch.device:
    """Return the device of that name; by default a GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}: expected cpu, cuda or cuda:N") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"tra does not run on the device {device!r}: expected cpu, cuda or cuda:N")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device is available")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no CUDA device {chosen.index}: this machine has {torch.cuda.device_count()}")
    return chosen


def device_name(device: torch.device) -> str:
    """Return the name that results are stored with."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return float32 or bfloat16: "auto" is bfloat16 on a GPU."""
    return ("bfloat16" if device.type == "cuda" else "float32") if precision == "auto" else precision


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return a context, which may be entered repeatedly, in which products are taken in the precision."""
    enabled = resolve_precision(precision, device) == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set how float32 products are taken ("highest": exactly, "high": in TF32 on a GPU), and restore it afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
