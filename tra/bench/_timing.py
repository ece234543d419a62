"""What measurements share."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
