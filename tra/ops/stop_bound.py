"""How much keys that haven't been read can weigh."""

from __future__ import annotations

import torch
from torch import Tensor


def log_rest(log_forget: Tensor, count: Tensor, keys_left: Tensor, highest_score: Tensor) -> Tensor:
    """Logarithm of the most that `keys_left` further keys can weigh, all with distances above `count`."""
    terms = torch.where(log_forget == 0, keys_left, torch.expm1(log_forget * keys_left) / torch.expm1(log_forget))
    decay = log_forget * (count + 1)
    rounding = 16 * torch.finfo(log_forget.dtype).eps * (1 + highest_score.abs() + decay.abs())
    return highest_score + decay + terms.log() + rounding
