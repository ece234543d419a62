"""The model card of an exported run: description, results, how to load it, origin."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

import tra
from tra.config import RunConfig
from tra.report.markdown import table
from tra.report.names import name_of
from tra.runs import RunFolder, exact_text, is_finite, length_text, read_rows, variant_of
from tra.text.task import Text

HEADER = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- threshold-relative-attention
- {mechanism}
---
"""

LOAD = """\
## Use

With the package threshold-relative-attention (imported as `tra`) and transformers 5.17 or newer installed:

```python
{imports}
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
inputs = tokenizer("{example}", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={new})[0]))
```
"""


def model_card(run: RunFolder, name: str, parameters: int, example: str, new: int) -> str:
    """Return the card as Markdown with a YAML header.

    Args:
        name: Name of the exported folder.
        parameters: Number of parameters.
        example: A prompt.
        new: Number of tokens of its answer.
    """
    config = run.config()
    model = config.model
    file = model.mechanism.rpartition(":")[0]  # the user's file, if any
    imports = "import tra.hub  # or trust_remote_code=True, which does no more than that"
    if file:
        imports = f"import tra.hub\n\ntra.import_file({file!r})  # the mechanism's file, which is not in this folder"
    parts = [
        HEADER.format(mechanism=model.mechanism),
        f"# {name}\n",
        f"A decoder with {name_of(variant_of(asdict(model)))}: {model.n_layers} layers, {model.n_heads} heads, width "
        f"{model.d_model}, {parameters:,} parameters. Trained on {_data_text(config)}: {config.train.steps:,} steps of "
        f"{config.train.batch_size} sequences, seed {config.train.seed}.\n",
        *_results(run),
        LOAD.format(imports=imports, folder=name, example=example, new=new),
        *_origin(run),
    ]
    return "\n".join(parts)


def _data_text(config: RunConfig) -> str:
    task = config.task.build()
    if isinstance(task, Text):
        data = "Alice's Adventures in Wonderland" if task.data is None else f"the text {Path(task.data).name!r}"
        return f"{data} in windows of {task.window} tokens ({task.tokenizer})"
    arguments = ", ".join(f"{key} {value}" for key, value in config.task.arguments.items())
    return f"the task {task.name}" + (f" ({arguments})" if arguments else "")


def _results(run: RunFolder) -> list[str]:
    lines: list[str] = []
    if rows := read_rows(run.evaluation_file, ("split", "shortest", "longest", "examples", "exact", "low", "high")):
        header = ["split", "length", "sequences", "without an error (95 %)"]
        lines += table(
            header, [[row["split"], length_text(row), f"{row['examples']:,}", exact_text(row)] for row in rows]
        )
    if rows := read_rows(run.perplexity_file, ("text", "window", "overlap")):
        lines += [""] if lines else []
        header = ["text", "window", "overlap", "perplexity", "a word", "bits a byte"]
        lines += table(
            header, [[row["text"], f"{row['window']:,}", row["overlap"], *_perplexities(row)] for row in rows]
        )
    return ["## Results\n", *lines, ""] if lines else []


def _perplexities(row: dict[str, Any]) -> list[str]:
    found = (("perplexity", ".2f"), ("word_perplexity", ".2f"), ("bits_per_byte", ".4f"))
    return [f"{row[key]:{form}}" if is_finite(row.get(key)) else "" for key, form in found]


def _origin(run: RunFolder) -> list[str]:
    """Return versions and commits of training and export, and the config."""
    lines = ["## Origin\n"]
    for session in run.sessions():
        version, commit, torch, device, started = (
            session.get(key, "unknown") for key in ("tra", "commit", "torch", "device", "started")
        )
        lines.append(f"- trained with tra {version} (commit {commit}), torch {torch}, on {device}, from {started}")
    lines.append(f"- exported with tra {tra.__version__}, transformers {transformers.__version__}")
    return [*lines, "- the run's config.json, whole:\n", "```json", run.config_file.read_text().strip(), "```", ""]
