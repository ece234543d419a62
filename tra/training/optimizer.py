"""AdamW as the runs use it, and its state as plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tra.config import OptimConfig


def adamw(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """Fused on a GPU, with the rate as a tensor there, so that a captured step can be replayed at another rate."""
    on_gpu = device.type == "cuda"
    return torch.optim.AdamW(
        model.parameters(),
        lr=torch.tensor(config.lr, device=device) if on_gpu else config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=on_gpu,
        capturable=on_gpu,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`exp_avg.layers.0.…`: the optimiser's state under the names of the parameters."""
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave."""
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = tensors[f"{key}.{name}"]
            on_cpu = key == "step" and parameter.device.type == "cpu"
            state[key] = value.clone() if on_cpu else value.to(parameter.device, copy=True)


def empty_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The state after no step, to be filled."""
    for parameter in model.parameters():
        on_cpu = parameter.device.type == "cpu"
        zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device="cpu" if on_cpu else parameter.device)} | zeros
