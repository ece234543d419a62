"""Exported folders: damaged runs are exported, and damaged exports replaced or loaded by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fuzz.campaign import Examples, examine, shards
from tests.fuzz.sandbox import IMPORTS, Sandbox
from tests.fuzz.tampering import Tamper, tampers

pytest.importorskip("transformers")

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
               "README.md", "modeling_tra.py")  # fmt: skip
RUN_FILES = ("run/config.json", "run/model.safetensors", "run/eval.jsonl", "run/environment.json", "text/config.json",
             "text/model.safetensors", "text/perplexity.jsonl", "run/metrics.jsonl", "mine/config.json",
             "mine/model.safetensors")  # fmt: skip
TEMPORARY = (".model.exporting", ".language.exporting", ".new.exporting")
COMMANDS = (
    ("export", "run", "new"),
    ("export", "text", "new"),
    ("export", "run", "model", "--overwrite"),
    ("export", "text", "language", "--overwrite"),
    ("export", "run", "model"),
    ("export", "mine", "new"),
    ("export", "mine", "new", *IMPORTS),
    ("export", "mine", "own", "--overwrite", *IMPORTS),
    ("export", "margin", "own", "--overwrite"),
)

Example = tuple[list[Tamper], tuple[str, ...]]


@shards("exports", quick=0, slow=30, share=0.012, time_share=0.04)
def test_exports(examples: Examples, export_sandbox: Sandbox) -> None:
    files = (*RUN_FILES, *RUN_FILES, *(f"{model}/{name}" for model in ("model", "own") for name in MODEL_FILES),
    "model",
             "language", "own", *TEMPORARY)  # fmt: skip
    damaged = st.tuples(st.lists(tampers(files), min_size=1, max_size=2), st.sampled_from(COMMANDS))

    def attack(example: Example) -> None:
        damage, arguments = example
        told = "; ".join(map(str, damage))
        examine("exports", export_sandbox, arguments, lambda place: [tamper.apply(place) for tamper in damage], told)

    examples.run(damaged, attack)


@shards("exports loaded", quick=0, slow=20, share=0.008, time_share=0.04)
def test_loading_exports(examples: Examples, export_sandbox: Sandbox) -> None:
    """What transformers itself says of a damaged folder is its own; what our classes raise is a ValueError."""
    names = tuple(f"{model}/{name}" for model in ("model", "language", "own") for name in MODEL_FILES[:5])

    def attack(example: tuple[list[Tamper], bool]) -> None:
        damage, is_named = example
        told = "; ".join(map(str, damage))
        model = Path(damage[0].path).parts[0]
        files = ("own_mechanism.py",) if is_named else ()
        examine(
            "exports loaded",
            export_sandbox,
            ("(transformers loads)", model, *files),
            lambda place: [tamper.apply(place) for tamper in damage],
            told,
            lambda: _load(model, files),
        )

    examples.run(st.tuples(st.lists(tampers(names), min_size=1, max_size=2), st.booleans()), attack)


def _load(folder: str, files: tuple[str, ...]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import tra.hub

    for file in files:
        tra.import_file(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        model(torch.tensor([tokenizer("w1").input_ids[:4] or [0]]))
    except Exception as error:
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        is_ours = last is not None and last.tb_frame.f_globals.get("__name__", "").startswith("tra.")
        if is_ours and not isinstance(error, ValueError):
            raise
