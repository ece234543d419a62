"""AdamW as the runs use it, and its state as plain tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tra.config import OptimConfig


def adamw(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """Return the optimizer of a run.

    On a GPU it is fused and its rate is a tensor, so that a captured step can be replayed at another rate. Steps with
    sharded weights are not captured.
    """
    on_gpu = device.type == "cuda"
    captured = on_gpu and not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return torch.optim.AdamW(
        model.parameters(),
        lr=torch.tensor(config.lr, device=device) if captured else config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=on_gpu,
        capturable=captured,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step; in place where it is a tensor that a captured step reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state, each tensor named after its parameter: `exp_avg.<parameter>`."""
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def check_optimizer_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a state from `optimizer_tensors` is of another model. It may be on the meta device."""
    for name, parameter in model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = tensors.get(f"{key}.{name}")
            shape = () if key == "step" else parameter.shape
            if value is None or value.shape != shape or not value.is_floating_point():
                raise ValueError(f"the optimizer's {key} of {name} doesn't fit the model")


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state that `optimizer_tensors` returned. Raise a ValueError if it is of another model."""
    check_optimizer_tensors(model, tensors)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = tensors[f"{key}.{name}"]
            on_cpu = key == "step" and parameter.device.type == "cpu"
            state[key] = value.clone() if on_cpu else value.to(parameter.device, copy=True)


def allocate_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer a state of zeros, into which that of another process or of a checkpoint is then copied."""
    for parameter in model.parameters():
        zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | zeros
