"""Share a step between the processes of a run: by DDP each has all weights, by FSDP2 each has a part of them.

The loss is divided by the count of the whole batch, so gradients are added up; both engines would average them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tra.config import TrainConfig
from tra.ops import SequenceParts
from tra.training.distributed import TIMEOUT, Ranks, explain_lost_rank
from tra.training.loss import TrainingLoss

LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`TrainingLoss.forward`, or what does the same over several processes."""


def is_compiled(train: TrainConfig, device: torch.device) -> bool:
    """Return whether a step is compiled on this device."""
    return train.compile == "on" or (train.compile == "auto" and device.type == "cuda")


def share_rows(train: TrainConfig, length: int, ranks: Ranks) -> SequenceParts | None:
    """Return how neighbouring processes share rows of `length` tokens; None if each has whole rows.

    All processes call it.
    """
    sharing = ranks.sharing(train)
    if sharing == 1:
        return None
    groups = [
        dist.new_group(list(range(first, first + sharing)), timeout=TIMEOUT) for first in range(0, ranks.world, sharing)
    ]
    return SequenceParts(length, groups[ranks.rank // sharing])


def share(loss: TrainingLoss, train: TrainConfig, device: torch.device, ranks: Ranks) -> nn.Module:
    """Move a loss to the device and wrap it as `train.parallel` says; in one process it is not wrapped.

    Weights must be equal in all processes. Optimizers are made afterwards, as FSDP2 puts other parameters in place.
    """
    if not ranks.has_others:
        return loss.to(device)
    if is_compiled(train, device):
        compile_layers(loss)
    if train.parallel == "fsdp":
        return shard(loss, device, ranks.world)
    on_gpu = device.type == "cuda"
    wrapped = DistributedDataParallel(loss.to(device), [device] if on_gpu else None, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, lambda _, bucket: _add_up(bucket.buffer()))
    return wrapped


def compile_layers(loss: TrainingLoss) -> None:
    """Compile each layer alone, in place.

    A whole compiled model would return all gradients at its end, with nothing left to compute while they are sent. And
    FSDP2 gathers weights between layers, which can't be compiled.
    """
    for layer in loss.model.layers:
        layer.compile(dynamic=False)


def shard(loss: TrainingLoss, device: torch.device, world: int) -> nn.Module:
    """Shard a loss by FSDP2: each layer is gathered for its own forward and backward pass, the rest for the whole pass.

    Layers are moved to the device one by one. Weights are gathered in float32, and products run under autocast as in
    one process. With weights rounded before, gates would differ from those of evaluation, multiplied by distances.
    """
    mesh = init_device_mesh(device.type, (world,))
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*loss.model.layers, loss):
        fully_shard(module, mesh=mesh, mp_policy=precision)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum of products
    register_fsdp_forward_method(loss, "statistics")
    return loss


@contextlib.contextmanager
def gradient_sync(loss: nn.Module, enabled: bool) -> Iterator[None]:
    """Exchange the gradients of passes within the context, or keep them for a later exchange."""
    if isinstance(loss, FSDPModule):
        loss.set_requires_gradient_sync(enabled)
    with loss.no_sync() if isinstance(loss, DistributedDataParallel) and not enabled else contextlib.nullcontext():
        yield


def release(loss: nn.Module) -> None:
    """Delete DDP's reducer while the processes are still connected. The loss can't be used afterwards.

    If the reducer held the last reference to the group, its destructor would wait for the group's threads while it
    holds Python's lock, which these threads may need to end.
    """
    if isinstance(loss, DistributedDataParallel):
        del loss.logger, loss.reducer


def is_sharded(loss: nn.Module) -> bool:
    """Return whether each process holds a part of the weights."""
    return isinstance(loss, FSDPModule)


def training_statistics(loss: nn.Module, tokens: Tensor) -> list[dict[str, Tensor]]:
    """Return `Decoder.statistics` of this process's tokens. All processes call it."""
    plain: Any = loss.module if isinstance(loss, DistributedDataParallel) else loss
    with explain_lost_rank():
        found: list[dict[str, Tensor]] = plain.statistics(tokens)
    if isinstance(loss, FSDPModule):
        loss.reshard()  # a backward pass would have done it
    return found


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; other tensors unchanged."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor  # type: ignore[operator]
    return local


def whole_tensors(tensors: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return whole tensors on the CPU of the first process, and nothing in the others. All processes call it."""
    found = {}
    for name, tensor in tensors.items():
        with explain_lost_rank():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[operator]
        if ranks.is_first:
            found[name] = whole.cpu()
    return found


def _add_up(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Begin to add up gradients, since DDP by itself divides them by the number of processes."""
    work = dist.all_reduce(gradients, async_op=True)
    sums: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return sums
