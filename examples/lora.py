"""Train adapters of an exported model by PEFT, and load them again.

python examples/lora.py my-model my-adapters
"""

from __future__ import annotations

import sys

from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import tra.hub  # noqa: F401 - registers the model
from tra.text import shipped_text


def main(source: str, target: str, steps: int = 200) -> None:
    """Train adapters for the model in folder `source` and write them alone to `target`."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    # "all-linear" includes the forget gate; without target_modules, queries and values get adapters.
    options = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=8, lora_alpha=16)
    adapted = get_peft_model(model, options)
    adapted.print_trainable_parameters()
    paragraphs = shipped_text().read_text().split("\n\n")
    rows = [{"input_ids": tokenizer(text + tokenizer.eos_token).input_ids[:512]} for text in paragraphs if text]
    arguments = TrainingArguments(
        output_dir=target,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        gradient_checkpointing=True,
        save_strategy="no",
        report_to=[],
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(adapted, arguments, train_dataset=rows, data_collator=collator).train()
    adapted.save_pretrained(target)
    again = AutoModelForCausalLM.from_pretrained(target)  # reads the model from `source`
    inputs = tokenizer("Alice was", return_tensors="pt")
    print(tokenizer.decode(again.generate(**inputs, max_new_tokens=20)[0]))


if __name__ == "__main__":
    main(*sys.argv[1:3])
