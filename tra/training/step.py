"""One optimizer step, plain or as a compiled CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tra.config import RunConfig
from tra.model import Decoder
from tra.tasks import Batch
from tra.training.device import autocast
from tra.training.distributed import Ranks
from tra.training.loss import COUNTS, loss_and_counts

WARM_UP_STEPS = 3
"""Steps before a capture, in which kernels are compiled and memory is allocated."""

StepFunction = Callable[[Batch], Tensor]


def make_step(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    size: int,
    device: torch.device,
    ranks: Ranks | None = None,
) -> StepFunction:
    """Return the step of a run: this process's rows -> `[COUNTS]` float64 of all processes, on the device.

    Args:
        size: Tokens of a row.
        ranks: The processes of the run; this one alone by default.
    """
    ranks = Ranks() if ranks is None else ranks
    compiled = config.train.compile == "on" or (config.train.compile == "auto" and device.type == "cuda")
    function = loss_and_counts(model)
    if compiled:
        function = torch.compile(function, dynamic=False)
    precision = autocast(device, config.train.precision)
    parameters = list(model.parameters())

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        count = batch.loss_mask.sum()
        if ranks.has_others:
            ranks.sum([count])
        count = count.clamp(min=1)
        sums = torch.zeros(COUNTS, dtype=torch.float64, device=device)
        parts = zip(*[x.chunk(config.train.accumulate) for x in batch], strict=True)
        for tokens, targets, loss_mask in parts:
            with precision:
                loss, counts = function(tokens, targets, loss_mask, count)
            loss.backward()
            sums += counts
        if ranks.has_others:
            ranks.sum([parameter.grad for parameter in parameters if parameter.grad is not None])
            ranks.sum([sums])
        if config.optim.clip is not None:
            nn.utils.clip_grad_norm_(parameters, config.optim.clip)
        optimizer.step()
        return sums

    if compiled and device.type == "cuda":
        return _capture(step, model, optimizer, (config.train.batch_size // ranks.world, size), device)
    return step


def _capture(
    step: StepFunction, model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, int], device: torch.device
) -> StepFunction:
    """Capture a whole step, which is then replayed by one launch. Weights and optimizer state are left unchanged."""
    static = Batch(
        torch.zeros(shape, dtype=torch.int64, device=device),
        torch.zeros(shape, dtype=torch.int64, device=device),
        torch.ones(shape, dtype=torch.bool, device=device),
    )
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = {
        (parameter, key): value.clone()
        for parameter in model.parameters()
        for key, value in optimizer.state[parameter].items()
    }
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            step(static)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        sums = step(static)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(weights[name])
        for parameter in model.parameters():
            for key, value in optimizer.state[parameter].items():
                old = state.get((parameter, key))
                value.zero_() if old is None else value.copy_(old)

    def replay(batch: Batch) -> Tensor:
        for input_buffer, given in zip(static, batch, strict=True):
            input_buffer.copy_(given)
        graph.replay()
        return sums

    return replay
