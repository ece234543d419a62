"""FSDP2 in a world of one: whatever reads weights finds them gathered, and the numbers are those of a plain model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.slow import slow
from tra.attention import MECHANISMS
from tra.model import Decoder, DecoderConfig
from tra.tasks import Batch
from tra.training import loss as loss_module
from tra.training.ddp_and_fsdp import local_part, shard, training_statistics
from tra.training.device import autocast
from tra.training.loss import TrainingLoss

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(module: nn.Module, batch: Batch, precision: str) -> list[torch.Tensor]:
    """Train three steps, with statistics in between, and return losses and statistics."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        with autocast(CPU, precision):
            loss, counts = module(*batch, batch.loss_mask.sum())
        loss.backward()
        optimizer.step()
        found += [loss.detach(), counts]
        found += [value for layer in training_statistics(module, batch.tokens) for value in layer.values()]
    return found


CASES = [("tra", "bfloat16", True), *slow(*((mechanism, "float32", mechanism == "rope") for mechanism in MECHANISMS))]


@pytest.mark.parametrize(("mechanism", "precision", "large_vocabulary"), CASES)
def test_a_sharded_model_is_the_plain_one_to_the_bit(
    mechanism: str, precision: str, large_vocabulary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "LARGE_VOCABULARY", 1 if large_vocabulary else 4096)
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(TrainingLoss(Decoder(DecoderConfig(11, d_model=32, n_layers=2, n_heads=2, mechanism=mechanism))))
    tokens, targets = torch.randint(11, (2, 3, 9))
    batch = Batch(tokens, targets, torch.rand(3, 9) < 0.7)
    plain, sharded = modules[0], shard(modules[1], CPU, 1)
    expected, found = losses(plain, batch, precision), losses(sharded, batch, precision)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(one, local_part(other))
