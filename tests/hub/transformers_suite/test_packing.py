"""Documents packed into one row, as collators of transformers and TRL write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from tests.hub.models import config, language_model, tokens
from tests.slow import slow
from tra.attention import MECHANISMS
from tra.hub import TRAForCausalLM

LENGTHS = (5, 1, 7, 3)
PACKED = [name for name in MECHANISMS if name != "lstm"]


def packed() -> tuple[list[Tensor], Tensor, Tensor]:
    """Return documents `[1, length]`, and the same in one row with their positions."""
    rows = [tokens(1, length, seed=length) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return rows, torch.cat(rows, 1), positions


@pytest.mark.parametrize("mechanism", PACKED)
def test_restarting_positions_are_documents(mechanism: str) -> None:
    model = language_model(mechanism)
    rows, ids, positions = packed()
    with torch.no_grad():
        apart = torch.cat([model(row, use_cache=False).logits for row in rows], 1)
        together = model(ids, position_ids=positions, use_cache=False).logits
        body = model.model(ids, position_ids=positions, use_cache=False).last_hidden_state
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(model.lm_head(body), apart)


def test_a_batch_packs_each_row_by_itself() -> None:
    model = language_model()
    ids = tokens(2, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    out = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(out[1], model(ids[1:], use_cache=False).logits[0])
    torch.testing.assert_close(out[0, 3:], model(ids[:1, 3:], use_cache=False).logits[0])


@pytest.mark.parametrize("mechanism", ["tra", "rope"])
@pytest.mark.parametrize("masked", [True, *slow(False)])
def test_a_compiled_model_takes_documents_too(mechanism: str, masked: bool) -> None:
    """Where it can't see that a mask hides nothing, or that a row is one document."""
    model = language_model(mechanism)
    rows, ids, positions = packed()
    batch = {"input_ids": ids.repeat(2, 1), "position_ids": torch.stack([positions[0], torch.arange(ids.shape[1])])}
    if masked:  # on the left of the second row
        mask = torch.ones_like(batch["input_ids"])
        mask[1, :4] = 0
        batch |= {"attention_mask": mask, "position_ids": torch.stack([positions[0], (mask[1].cumsum(0) - 1).clamp(0)])}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        found = compiled(**batch, use_cache=False).logits
        apart = torch.cat([model(row, use_cache=False).logits for row in rows], 1)
        whole = model(ids[:, 4 * masked :], use_cache=False).logits
    torch.testing.assert_close(found[:1], apart)
    torch.testing.assert_close(found[1:, 4 * masked :], whole)


def test_an_lstm_says_that_it_reads_one_document() -> None:
    _, ids, positions = packed()
    with pytest.raises(ValueError, match="one document per row"):
        language_model("lstm")(ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("positions", [[[1, 0, 2, 3]], [[0, 2, 4, 6]], [[5, 6, 7, 8]]])
def test_positions_that_count_nothing_get_one_clear_line(positions: list[list[int]]) -> None:
    """Places are worked out, not taken: other positions than those of whole documents would be ignored in silence."""
    with pytest.raises(ValueError, match="position_ids"):
        language_model()(tokens(1, 4), position_ids=torch.tensor(positions), use_cache=False)


def test_what_the_collator_of_transformers_makes_is_understood() -> None:
    model = language_model()
    rows, _, _ = packed()
    features = [{"input_ids": row[0].tolist()} for row in rows]
    collator = DataCollatorWithFlattening(return_tensors="pt", return_seq_idx=True, return_flash_attn_kwargs=True)
    batch = collator(features)
    loss = model(**batch, use_cache=False).loss
    apart = [model(row, labels=row, use_cache=False).loss * (row.shape[1] - 1) for row in rows if row.shape[1] > 1]
    torch.testing.assert_close(loss, sum(apart) / sum(length - 1 for length in LENGTHS))


def test_trainer_packs(tmp_path: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data: Any = [{"input_ids": tokens(1, length, seed=length)[0].tolist()} for length in (5, 9, 7, 3, 8, 6)]
    collator = DataCollatorWithFlattening(return_tensors="pt")
    Trainer(TRAForCausalLM(config()), arguments, train_dataset=data, data_collator=collator).train()


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_trl_packs(strategy: str, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = [{"input_ids": tokens(1, length, seed=length)[0].tolist()} for length in (5, 9, 7, 3, 8, 6)]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=1, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", disable_tqdm=True, packing=True, packing_strategy=strategy, max_length=16,
        gradient_checkpointing=False,
    )  # fmt: skip
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer(models.WordLevel({f"t{index}": index for index in range(31)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, pad_token="t0", eos_token="t1")
    model = TRAForCausalLM(config())
    data = datasets.Dataset.from_list(rows)
    trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer).train()
