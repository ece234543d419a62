"""`tra export`: save a trained run as a folder that transformers loads."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from tra.cli.options import add_tokenizer_files
from tra.runs.failures import pip_install

DESCRIPTION = """Save a trained run as a folder that transformers loads: weights, config,
tokenizer and model card. The folder is written whole or not at all.

  tra export flipflop-tra my-model"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or flipflop-tra, a run that comes with tra")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the model goes")
    parser.add_argument("--overwrite", action="store_true", help="replace the exported model in the folder")
    add_tokenizer_files(parser)


def run(options: argparse.Namespace) -> int:
    from tra.runs import RunFolder

    run = RunFolder.open(options.run)
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"tra export needs transformers: {pip_install('transformers>=5.17')}")
    from tra.hub.export import export_run

    model = export_run(run, options.folder, overwrite=options.overwrite, tokenizer_files=options.tokenizer_files)
    print(
        f"{options.folder}: {model.num_parameters():,} parameters "
        f"(next: import tra.hub; AutoModelForCausalLM.from_pretrained({str(options.folder)!r}))"
    )
    return 0
