"""Put a classifier on an exported model: does a paragraph hold speech?

python examples/classify.py my-model my-classifier
"""

from __future__ import annotations

import sys

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import tra.hub  # noqa: F401 - registers the model
from tra.text import shipped_text

QUOTES = '"“”'


def main(source: str, target: str, steps: int = 200) -> None:
    """Train a classifier on the model in folder `source`, and write it to `target`."""
    names = {0: "narration", 1: "speech"}
    model = AutoModelForSequenceClassification.from_pretrained(source, id2label=names)  # the head on top is new
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = []
    for text in filter(None, shipped_text().read_text().split("\n\n")):
        label = int(any(quote in text for quote in QUOTES))
        rows.append(tokenizer(text, truncation=True, max_length=256) | {"labels": label})
    arguments = TrainingArguments(
        output_dir=target,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-4,
        save_strategy="no",
        report_to=[],
    )
    Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer)).train()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    inputs = tokenizer("“Oh dear!” said Alice.", return_tensors="pt").to(model.device)
    with torch.no_grad():
        print(names[int(model.eval()(**inputs).logits.argmax())])


if __name__ == "__main__":
    main(*sys.argv[1:3])
