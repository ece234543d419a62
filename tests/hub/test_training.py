"""transformers' Trainer, for which gradient accumulation is to change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

from tests.hub.models import VOCABULARY, config
from tra.hub import TRAForCausalLM


def rows(count: int) -> list[dict[str, Any]]:
    """Counting from anywhere; of every second four only the last 3 labels count."""
    found = []
    for index in range(count):
        ids = (torch.arange(12) + 5 * index) % VOCABULARY
        labels = torch.where(torch.arange(12) < (9 if index % 8 > 3 else 0), -100, ids)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def trained(folder: Path, batch: int, pieces: int, **options: Any) -> tuple[TRAForCausalLM, list[float]]:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=pieces,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        **({"max_steps": 20, "learning_rate": 1e-2} | options),
    )
    model = TRAForCausalLM(config())
    trainer = Trainer(model, arguments, train_dataset=rows(32))
    trainer.train()
    return model, [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_falls(tmp_path: Path, checkpointing: bool) -> None:
    _, losses = trained(tmp_path, 8, 1, gradient_checkpointing=checkpointing)
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    """Rows differ in how many labels count, so a mean of means would be far from the gradient of the whole."""
    options = {"max_steps": 1, "learning_rate": 1.0, "optim": "sgd", "max_grad_norm": 0.0}
    torch.manual_seed(0)
    start = TRAForCausalLM(config()).double()
    batch = rows(8)
    ids, labels = (torch.stack([row[key] for row in batch]) for key in ("input_ids", "labels"))
    logits, targets = start(ids).logits[:, :-1], labels[:, 1:]
    F.cross_entropy(logits[targets != -100], targets[targets != -100]).backward()
    errors = []
    for sizes in ((8, 1), (2, 4)):
        model, _ = trained(tmp_path, *sizes, **options)
        exact = torch.cat([(parameter.detach() - parameter.grad).flatten() for parameter in start.parameters()])
        found = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        errors.append(float((found - exact).norm()))
    assert errors[1] <= 2 * errors[0]
