"""Find sources of text by their names, and stream their documents, so that no corpus is ever whole in memory.

| format | names | documents |
|---|---|---|
| wikitext | wiki.train.raw, wiki.valid.tokens, wiki.test.detok.txt, …, or a folder of them | articles |
| text | *.txt, or a folder of them in the order of their names | files |
| jsonl | *.jsonl, or a folder of them | the `text` of each line |
| jsonl-titled | the same, when asked for | the same, below a heading: `= title =` |
| tokens | *.bin, uint16 with the separator before each document; several form one stream | the stream's |
| hub | hub:DATASET:CONFIG, through the `datasets` library | WikiText's articles; rows of others |

Files may end in .xz or .gz. A document without text is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tra.text.formats import DocumentSplitter, TextPart, articles, json_texts, token_documents, token_ids
from tra.text.hub_datasets import PREFIX, HubSplit, hub_splits
from tra.text.source_files import COMPRESSIONS, SourceFile, split_lines
from tra.text.store import SPLITS, TokenPart
from tra.text.tokenizer import Tokenizer

FORMATS = ("auto", "wikitext", "text", "jsonl", "jsonl-titled", "tokens")

_WIKITEXT = re.compile(rf"wiki\.({'|'.join(SPLITS)})\.(raw|tokens|detok\.txt)")
_ENDINGS = {".txt": "text", ".jsonl": "jsonl", ".bin": "tokens"}


class Source(Protocol):
    """Documents that are read once, in order. `facts`, for the manifest, are complete after that."""

    @property
    def size(self) -> int:
        """Bytes that reading will report; 0 if unknown."""

    def parts(self, tokenizer: Tokenizer, report: Callable[[int], None]) -> Iterator[TextPart | TokenPart]: ...

    def facts(self) -> list[dict[str, Any]]: ...


class FileSource:
    """Files of one format, in order."""

    def __init__(self, paths: Sequence[Path], form: str) -> None:
        self.files = [SourceFile(path) for path in paths]
        self.form = form
        self.size = sum(file.size for file in self.files)

    def parts(self, tokenizer: Tokenizer, report: Callable[[int], None]) -> Iterator[TextPart | TokenPart]:
        if self.form == "tokens":
            stream = (ids for file in self.files for ids in token_ids(file.blocks(report), file.path, tokenizer))
            yield from token_documents(stream, tokenizer)
            return
        splitter = DocumentSplitter()
        for file in self.files:
            text = file.text(report)
            if self.form == "wikitext":
                for begins, line in articles(split_lines(text)):
                    if begins:
                        yield from splitter.end()
                    yield from splitter.add(line)
            elif self.form.startswith("jsonl"):
                for document in json_texts(split_lines(text), file.path, titled=self.form == "jsonl-titled"):
                    yield from splitter.add(document)
                    yield from splitter.end()
            else:
                for block in text:
                    yield from splitter.add(block)
            yield from splitter.end()

    def facts(self) -> list[dict[str, Any]]:
        return [file.facts() for file in self.files]


class HubSource:
    """One split of a dataset of the hub."""

    size = 0

    def __init__(self, split: HubSplit, is_wikitext: bool) -> None:
        self.split = split
        self.is_wikitext = is_wikitext

    def parts(self, tokenizer: Tokenizer, report: Callable[[int], None]) -> Iterator[TextPart | TokenPart]:
        splitter = DocumentSplitter()
        texts = self.split.texts(report)
        for begins, text in articles(texts) if self.is_wikitext else ((True, text) for text in texts):
            if begins:
                yield from splitter.end()
            yield from splitter.add(text)
        yield from splitter.end()

    def facts(self) -> list[dict[str, Any]]:
        return [self.split.facts()]


def find_sources(names: Sequence[str | Path], form: str = "auto") -> dict[str, list[Source]]:
    """Return sources by the name of their store: "", or the names of the splits of a source that has several."""
    if form not in FORMATS:
        raise ValueError(f"unknown format {form!r}: known are {', '.join(FORMATS)}")
    if not names:
        raise ValueError("there is nothing to prepare: name a source")
    found: list[tuple[Path, str]] = []
    for name in names:
        splits = _splits(str(name), form)
        if len(splits) > 1 and len(names) > 1:
            raise ValueError(f"{name} has splits of its own ({', '.join(splits)}), so it is prepared alone")
        if len(splits) > 1 or (splits and str(name).startswith(PREFIX)):
            return splits if len(splits) > 1 else {"": next(iter(splits.values()))}
        found += _files(Path(name), form)
    sources: list[Source] = []
    for path, kind in found:
        last = sources[-1] if sources else None
        if isinstance(last, FileSource) and last.form == kind:
            sources[-1] = FileSource([*(file.path for file in last.files), path], kind)
        else:
            sources.append(FileSource([path], kind))
    return {"": sources}


def _splits(name: str, form: str) -> dict[str, list[Source]]:
    """Return the splits of a source by name; none where it is files without splits."""
    if name.startswith(PREFIX):
        is_wikitext = form == "wikitext" or (form == "auto" and "wikitext" in name)
        return {split: [HubSource(rows, is_wikitext)] for split, rows in hub_splits(name).items()}
    path = Path(name)
    if not path.is_dir() or form not in ("auto", "wikitext"):
        return {}
    by_split = {_split_of(file): file for file in _wikitext_files(path)}
    return {split: [FileSource([by_split[split]], "wikitext")] for split in SPLITS if split in by_split}


def _files(path: Path, form: str) -> list[tuple[Path, str]]:
    """Return a file, or those of a folder, each with its format."""
    if not path.exists():
        raise ValueError(f"there is no file or folder {path}")
    if not path.is_dir():
        kind = _format_of(path) if form == "auto" else form
        if kind is None:
            raise ValueError(f"the name of {path} doesn't tell its format: give --format {' | '.join(FORMATS[1:])}")
        return [(path, kind)]
    if wikitext := _wikitext_files(path) if form in ("auto", "wikitext") else []:
        return [(file, "wikitext") for file in wikitext]
    inside = [(file, _format_of(file)) for file in sorted(path.iterdir()) if file.is_file()]
    # When a format is given, a file whose name looks like WikiText's is taken by its ending alone.
    files = [(file, _ENDINGS.get(_uncompressed(file).suffix)) for file, _ in inside] if form != "auto" else inside
    asked = form.removesuffix("-titled")
    wanted = [(file, kind) for file, kind in files if kind is not None and asked in ("auto", kind)]
    if not wanted:
        what = "wiki.*.raw, .txt, .jsonl or .bin" if form == "auto" else form
        raise ValueError(f"{path} holds no {what} files")
    kinds = list(dict.fromkeys(kind for _, kind in wanted))
    if len(kinds) > 1:
        raise ValueError(f"{path} holds {' and '.join(kinds)} files: say with --format which to take")
    return [(file, kind if form == "auto" else form) for file, kind in wanted]


def _uncompressed(path: Path) -> Path:
    """Return the path without the ending of a compression."""
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def _format_of(path: Path) -> str | None:
    """Return the format that the name tells, if it does."""
    plain = _uncompressed(path)
    return "wikitext" if _WIKITEXT.fullmatch(plain.name) else _ENDINGS.get(plain.suffix)


def _split_of(path: Path) -> str:
    match = _WIKITEXT.fullmatch(_uncompressed(path).name)
    assert match
    return match[1]


def _wikitext_files(folder: Path) -> list[Path]:
    """Return the splits of a folder, in the first of the forms raw, tokens and detok.txt that it has."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    matches = [(file, match) for file in files if (match := _WIKITEXT.fullmatch(_uncompressed(file).name))]
    for ending in ("raw", "tokens", "detok.txt"):
        if by_split := {match[1]: file for file, match in matches if match[2] == ending}:
            return [by_split[split] for split in SPLITS if split in by_split]
    return []
