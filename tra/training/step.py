"""One optimiser step, plain or as a compiled CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from tra.config import RunConfig
from tra.model import Decoder, masked_cross_entropy
from tra.ops.linear_cross_entropy import linear_cross_entropy
from tra.tasks import Batch
from tra.training.distributed import Ranks

COUNTS = 5
"""What a step gives back: loss, tokens right, tokens scored, sequences right, sequences."""

LARGE_VOCABULARY = 4096
"""From here on the loss doesn't hold the logits of a whole batch."""

StepFunction = Callable[[Batch], Tensor]


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """bfloat16 where it is asked for, and by "auto" on a GPU."""
    enabled = precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)


def score(right: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens right, tokens scored, and sequences in which every scored token is right; the last `[B]` bool."""
    return (right & counted).sum(), counted.sum(), (right | ~counted).all(-1)


def loss_and_right(model: Decoder, batch: Batch, count: Tensor) -> tuple[Tensor, Tensor]:
    """Loss over `count` scored tokens, and which tokens the model would have guessed, `[B, T]` bool."""
    tokens, targets, loss_mask = batch
    if model.config.vocab_size < LARGE_VOCABULARY:
        logits = model(tokens)
        return masked_cross_entropy(logits, targets, loss_mask, count), logits.detach().argmax(-1) == targets
    row_weights = loss_mask.flatten().float() / count
    ids = targets.flatten().masked_fill(~loss_mask.flatten(), 0)
    scored = linear_cross_entropy(model.hidden(tokens).flatten(0, 1), model.lm_head.weight, ids, row_weights)
    return scored.loss, scored.right.view_as(targets)


def make_step(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    size: int,
    device: torch.device,
    ranks: Ranks | None = None,
) -> StepFunction:
    """The step of a run: this process's rows -> `[COUNTS]` float64 of all processes, on the device."""
    ranks = Ranks() if ranks is None else ranks
    compiled = config.train.compile == "on" or (config.train.compile == "auto" and device.type == "cuda")

    def loss_and_counts(tokens: Tensor, targets: Tensor, loss_mask: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        loss, right = loss_and_right(model, Batch(tokens, targets, loss_mask), count)
        correct, scored, exact = score(right, loss_mask)
        rows = torch.full_like(scored, len(tokens))
        return loss, torch.stack([loss.detach().double(), correct, scored, exact.sum(), rows])

    function = torch.compile(loss_and_counts, dynamic=False) if compiled else loss_and_counts
    parameters = list(model.parameters())

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        count = batch.loss_mask.sum()
        ranks.sum([count])
        count = count.clamp(min=1)
        sums = torch.zeros(COUNTS, dtype=torch.float64, device=device)
        pieces = zip(*(x.chunk(config.train.accumulate) for x in batch), strict=True)
        for tokens, targets, loss_mask in pieces:
            with autocast(device, config.train.precision):
                loss, counts = function(tokens, targets, loss_mask, count)
            loss.backward()
            sums += counts
        ranks.sum([parameter.grad for parameter in parameters if parameter.grad is not None])
        ranks.sum([sums])
        if config.optim.clip is not None:
            nn.utils.clip_grad_norm_(parameters, config.optim.clip)
        optimizer.step()
        return sums

    if compiled and device.type == "cuda":
        return _graphed(step, model, optimizer, (config.train.batch_size // ranks.world, size), device)
    return step


def _graphed(
    step: StepFunction,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, int],
    device: torch.device,
) -> StepFunction:
    """Capture a whole step; replaying it costs one launch. Warming up leaves weights and state as they were."""
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
        for _ in range(3):
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
        for mine, given in zip(static, batch, strict=True):
            mine.copy_(given)
        graph.replay()
        return sums

    return replay
