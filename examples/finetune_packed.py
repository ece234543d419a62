"""Fine-tune an exported model by transformers' Trainer, with documents packed into rows without padding.

python examples/finetune_packed.py my-model fine-tuned
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import tra.hub  # noqa: F401 - registers the model
from tra.text import shipped_text


def main(source: str, target: str, steps: int = 200) -> None:
    """Train the model in folder `source` on paragraphs, and write it to `target`."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    paragraphs = shipped_text().read_text().split("\n\n")
    documents = [{"input_ids": tokenizer(text + tokenizer.eos_token).input_ids[:512]} for text in paragraphs if text]
    arguments = TrainingArguments(
        output_dir=target,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-4,
        save_strategy="no",
        report_to=[],
    )
    # The 8 documents of a batch become one row. Its position_ids start again with each, and no document sees another.
    collator = DataCollatorWithFlattening(return_tensors="pt")
    Trainer(model, arguments, train_dataset=documents, data_collator=collator).train()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:3])
