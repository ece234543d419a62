"""Classification of sequences and tokens, and answers found in a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import tra.hub
from tests.hub.models import config, language_model, padded, tokens

AUTO = {
    "TRAForSequenceClassification": AutoModelForSequenceClassification,
    "TRAForTokenClassification": AutoModelForTokenClassification,
    "TRAForQuestionAnswering": AutoModelForQuestionAnswering,
}


@pytest.mark.parametrize("mechanism", ["tra", "rope"])
@pytest.mark.parametrize("name", list(AUTO))
def test_a_head_is_put_on_a_language_model(name: str, mechanism: str, tmp_path: Path) -> None:
    model = language_model(mechanism, pad_token_id=0)
    model.save_pretrained(tmp_path / "model")
    headed: Any = AUTO[name].from_pretrained(tmp_path / "model")
    assert type(headed) is getattr(tra.hub, name)
    ids = tokens(1, 6)
    body = headed.model(ids).last_hidden_state
    torch.testing.assert_close(body, model.model(ids).last_hidden_state)
    headed.save_pretrained(tmp_path / "headed")
    again = AUTO[name].from_pretrained(tmp_path / "headed")
    for key, weight in headed.state_dict().items():
        assert torch.equal(weight, again.state_dict()[key])


@pytest.mark.parametrize("side", ["left", "right"])
def test_classes_of_a_batch_are_those_of_its_rows(side: str) -> None:
    model = tra.hub.TRAForSequenceClassification(config(pad_token_id=0, num_labels=3)).double().eval()
    rows, ids, mask = padded([9, 6, 2], side)
    rows = [row.clamp(min=1) for row in rows]
    ids = torch.where(mask.bool(), ids.clamp(min=1), 0)
    together = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(together, torch.cat([model(row).logits for row in rows]))


@pytest.mark.parametrize("name", list(AUTO))
def test_heads_learn(name: str) -> None:
    torch.manual_seed(0)
    model = getattr(tra.hub, name)(config(pad_token_id=0, num_labels=2))
    ids = tokens(8, 6).clamp(min=1)
    first = (ids[:, 0] % 2).long()
    labels = {
        "TRAForSequenceClassification": {"labels": first},
        "TRAForTokenClassification": {"labels": ids % 2},
        "TRAForQuestionAnswering": {"start_positions": first, "end_positions": first + 1},
    }[name]
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(30):
        loss = model(ids, **labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
