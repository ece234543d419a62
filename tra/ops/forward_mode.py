"""Forward-mode differentiation (`torch.func.jvp`, `jacfwd`), for which operators of `torch.library` give 0 silently."""

from __future__ import annotations

import torch


def in_forward_mode() -> bool:
    """Return whether forward-mode derivatives are being computed."""
    return torch.autograd.forward_ad._current_level >= 0


def refuse_forward_mode(what: str) -> None:
    """Raise a RuntimeError in forward mode: `what` would have a derivative of 0 there."""
    if in_forward_mode():
        raise RuntimeError(f"{what} has no forward-mode derivative (torch.func.jvp, jacfwd): use reverse mode")
