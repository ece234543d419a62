"""Where the kernels can run."""

from __future__ import annotations

import importlib.util
import os

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
MAX_HEAD_WIDTH = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_unavailable(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Return why the kernels can't take heads of a width in a dtype on a device; None if they can."""
    if not HAS_TRITON:
        return "Triton is not installed (pip install triton)"
    if device.type != "cuda" and not (device.type in ("cpu", "meta") and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"the tensors are on {device}: it needs a CUDA device, or TRITON_INTERPRET=1 for tests on a CPU"
    if dtype == torch.bfloat16 and device.type != "cuda":
        return "Triton's interpreter has no products of bfloat16"
    if dtype not in DTYPES:
        return f"it computes in float16, bfloat16 and float32, not in {dtype}"
    if width > MAX_HEAD_WIDTH:
        return f"heads are at most {MAX_HEAD_WIDTH} wide, got {width}"
    return None
