"""Teach an exported model to chat by TRL: new tokens, a chat template, and supervised fine-tuning with packing.

python examples/sft_chat.py my-model my-chat
"""

from __future__ import annotations

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import tra.hub  # noqa: F401 - registers the model

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversation(number: int) -> list[dict[str, str]]:
    """Return a question and its answer."""
    return [
        {"role": "user", "content": f"What comes after {number}?"},
        {"role": "assistant", "content": str(number + 1)},
    ]


def main(source: str, target: str, steps: int = 500) -> None:
    """Train the model in folder `source` on conversations, and write it to `target`."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = TEMPLATE
    model.resize_token_embeddings(len(tokenizer))
    arguments = SFTConfig(
        output_dir=target,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        packing=True,
        max_length=256,
        bf16=False,
        save_strategy="no",
        report_to=[],
    )
    rows = Dataset.from_list([{"messages": conversation(number)} for number in range(1000)])
    SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer).train()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    prompt = tokenizer.apply_chat_template(
        conversation(41)[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model.eval()
    out = model.generate(**prompt.to(model.device), max_new_tokens=10, eos_token_id=tokenizer.eos_token_id)
    print(tokenizer.decode(out[0]))


if __name__ == "__main__":
    main(*sys.argv[1:3])
