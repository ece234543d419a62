"""One optimizer step, plain or as a compiled CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tra.config import RunConfig
from tra.model import Decoder
from tra.ops import SequenceParts
from tra.tasks import Batch
from tra.training.ddp_and_fsdp import LossFunction, gradient_sync, is_compiled, is_sharded
from tra.training.device import autocast
from tra.training.distributed import Ranks, explain_lost_rank
from tra.training.loss import COUNTS, TrainingLoss

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
    loss_module: nn.Module | None = None,
    row_parts: SequenceParts | None = None,
) -> StepFunction:
    """Return the step of a run: this process's rows -> `[COUNTS]` float64 of all processes, on the device.

    Rows that processes share come whole.

    In one process on a GPU a compiled step is captured as a CUDA graph. Several processes launch their kernels
    themselves: what FSDP2 gathers and frees can't be captured.

    Args:
        size: Tokens of a row.
        ranks: The processes of the run; this one alone by default.
        loss_module: The model's loss, as `share` wraps it; not wrapped by default.
        row_parts: How processes share rows, if they do.
    """
    ranks = Ranks() if ranks is None else ranks
    module = TrainingLoss(model, config.train.checkpoint_activations) if loss_module is None else loss_module
    is_whole = isinstance(module, TrainingLoss) and not is_sharded(module)
    compiled = is_whole and is_compiled(config.train, device)
    function: LossFunction = torch.compile(module, dynamic=False) if compiled else module
    precision = autocast(device, config.train.precision)
    parameters = list(model.parameters())

    def gradients(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        if row_parts is not None:
            batch = Batch(*(row_parts.take(x, 1) for x in batch))
        count = batch.loss_mask.sum()
        ranks.add_up(count)
        count = count.clamp(min=1)
        sums = torch.zeros(COUNTS, dtype=torch.float64, device=device)
        parts = list(zip(*[x.chunk(config.train.accumulate) for x in batch], strict=True))
        for index, (tokens, targets, loss_mask) in enumerate(parts):
            with gradient_sync(module, enabled=index == len(parts) - 1):
                with precision:
                    loss, counts = function(tokens, targets, loss_mask, count)
                loss.backward()
            sums += counts
        ranks.add_up(sums)
        if config.optim.clip is not None:
            nn.utils.clip_grad_norm_(parameters, config.optim.clip)
        return sums

    def step(batch: Batch) -> Tensor:
        with explain_lost_rank():  # before the optimizer, so that the weights are those after a whole step
            sums = gradients(batch)
        optimizer.step()
        return sums

    if compiled and device.type == "cuda":
        return _capture(step, model, optimizer, (config.train.batch_size, size), device)
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
