"""The loss of a decoder and the count of what it gets right: one place for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tra.model import Decoder
from tra.ops import SequenceParts
from tra.ops.linear_cross_entropy import linear_cross_entropy
from tra.tasks import Batch

COUNTS = 5
"""Numbers that a training step returns: loss, right tokens, scored tokens, right sequences, sequences."""

LARGE_VOCABULARY = 4096
"""Vocabulary size from which training never holds the logits of a whole batch."""


def masked_cross_entropy(logits: Tensor, targets: Tensor, loss_mask: Tensor, count: Tensor | None = None) -> Tensor:
    """Return the mean loss over the positions where `loss_mask` is True; 0 where there is none.

    Args:
        logits: `[B, T, V]`.
        targets: `[B, T]`; masked positions may hold any number.
        loss_mask: `[B, T]` bool.
        count: Positions to divide by, when this is a part of a larger batch; those of the mask by default.
    """
    mask = loss_mask.flatten()
    targets = targets.flatten().masked_fill(~mask, 0)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
    count = mask.sum().clamp(min=1) if count is None else count
    return torch.where(mask, losses, 0.0).sum() / count


def loss_and_right(
    model: Decoder,
    batch: Batch,
    count: Tensor,
    call_layer: Callable[..., Tensor] | None = None,
    parts: SequenceParts | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss over `count` scored tokens, and whether each target is the likeliest token, `[B, T]` bool.

    Args:
        call_layer: See `Decoder.hidden`.
        parts: How processes share the rows, of which the batch is this one's part.
    """
    tokens, targets, loss_mask = batch
    hidden = model.hidden(tokens, call_layer=call_layer, parts=parts)
    if model.config.vocab_size < LARGE_VOCABULARY:
        logits = model.lm_head(hidden)
        return masked_cross_entropy(logits, targets, loss_mask, count), logits.detach().argmax(-1) == targets
    row_weights = loss_mask.flatten().float() / count
    ids = targets.flatten().masked_fill(~loss_mask.flatten(), 0)
    scored = linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, ids, row_weights)
    return scored.loss, scored.right.view_as(targets)


def score(right: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of right tokens, that of scored tokens, and which sequences are wholly right, `[B]` bool."""
    return (right & counted).sum(), counted.sum(), (right | ~counted).all(-1)


class TrainingLoss(nn.Module):
    """A decoder with its loss: what a step differentiates, and what DDP and FSDP wrap.

    The loss is computed inside of the module, as it reads the head's weight, which FSDP gathers for `forward` alone.

    Args:
        checkpoint_activations: Compute what is inside of layers again in the backward pass.
        parts: How processes share rows; `forward` takes this one's part of them.
    """

    def __init__(
        self, model: Decoder, checkpoint_activations: bool = False, parts: SequenceParts | None = None
    ) -> None:
        super().__init__()
        self.model, self.parts = model, parts
        self.call_layer = _call_checkpointed if checkpoint_activations else None

    def forward(self, tokens: Tensor, targets: Tensor, loss_mask: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss over `count` scored tokens, and `[COUNTS]` float64."""
        batch = Batch(tokens, targets, loss_mask)
        loss, right = loss_and_right(self.model, batch, count, self.call_layer, self.parts)
        correct, scored, exact = score(right, loss_mask)
        sequences = torch.full_like(scored, len(tokens))
        if self.parts is not None:  # a row is right where all its parts are, and one process counts it
            exact = self.parts.transport.all_gather(exact.to(torch.uint8))().bool().all(0)
            if self.parts.rank > 0:
                exact, sequences = torch.zeros_like(exact), torch.zeros_like(sequences)
        return loss, torch.stack([loss.detach().double(), correct, scored, exact.sum(), sequences])

    def statistics(self, tokens: Tensor) -> list[dict[str, Tensor]]:
        """Return `Decoder.statistics`."""
        return self.model.statistics(tokens)


def _call_checkpointed(layer: nn.Module, *inputs: Any) -> Tensor:
    out: Tensor = checkpoint(layer, *inputs, use_reentrant=False)
    return out


def cross_entropy_by_token(model: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of every token, `[B, T]`, from what the head reads, `[B, T, d_model]`.

    The head is applied in float32: logits rounded to bfloat16 would add noise to every loss.
    """
    ids = targets.flatten()
    no_weights = torch.zeros(len(ids), device=hidden.device)  # the weighted sum is not needed
    scored = linear_cross_entropy(hidden.flatten(0, 1).float(), model.lm_head.weight.float(), ids, no_weights)
    return scored.losses.view_as(targets)
