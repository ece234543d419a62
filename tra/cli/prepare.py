"""`tra prepare`: turn text into token stores."""

from __future__ import annotations

import argparse
import json

from tra.cli.options import add_json, add_tokenizer_files

DESCRIPTION = """Turn text into a token store, the folder that training and evaluation read.
The store is written whole or not at all.

  tra prepare wikitext-103-raw/ data/wikitext-103
  tra prepare books/*.txt data/books --hold-out 3

A source is one of, also as .xz or .gz:
  a WikiText folder or file (wiki.train.raw)
  a .txt file, or a folder of them: each is one document
  a .jsonl file: each line's field "text" is one document
  a .bin file: a stream of tokens, uint16
  hub:Salesforce/wikitext:wikitext-103-raw-v1
A source with several splits becomes the stores DIR/train, DIR/valid, DIR/test."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        default=[],
        metavar="PATH",
        help="SOURCE ... DIR: what to read; last, where the store goes",
    )
    parser.add_argument(
        "--tokenizer", choices=("gpt2", "bytes"), default="gpt2", help="GPT-2's BPE, or plain bytes (default: gpt2)"
    )
    add_tokenizer_files(parser)
    parser.add_argument(
        "--format",
        choices=("auto", "wikitext", "text", "jsonl", "jsonl-titled", "tokens"),
        default="auto",
        help="what the sources are, if their names don't tell; jsonl-titled puts the field title above the text "
        "(default: auto)",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="threads (default: one per core); the store is the same for any number"
    )
    parser.add_argument(
        "--hold-out",
        type=int,
        default=0,
        metavar="N",
        help="the last N documents become DIR/valid, the others DIR/train (default: 0)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the store in DIR")
    add_json(parser, "print the stores' manifests instead of a line for each")


def run(options: argparse.Namespace) -> int:
    from tra.cli.display import PrepareDisplay
    from tra.text.prepare import prepare
    from tra.text.tokenizer import load_tokenizer

    *sources, folder = options.paths or [""]
    if not sources:
        raise ValueError("say what to prepare, and where the store goes: tra prepare SOURCE ... DIR")
    tokenizer = load_tokenizer(options.tokenizer, options.tokenizer_files)
    with PrepareDisplay(quiet=options.json) as display:
        manifests = prepare(
            sources,
            folder,
            tokenizer=tokenizer,
            format=options.format,
            jobs=options.jobs,
            hold_out=options.hold_out,
            overwrite=options.overwrite,
            progress=display,
        )
    if options.json:
        print(json.dumps(manifests, indent=2))
        return 0
    for store, manifest in manifests.items():
        words = "" if manifest["words"] is None else f"{manifest['words']:,} words, "
        documents = f"{manifest['documents']:,} document{'s' if manifest['documents'] > 1 else ''}"
        print(f"{store}: {documents}, {words}{manifest['tokens']:,} tokens")
    return 0
