"""The share of a text that stands in the training text, against a plain count."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import text_overlap
from benchmarks.text_overlap import find_overlap, main
from tra.text import TokenStore, load_tokenizer
from tra.text.prepare import prepare

LENGTH = 4


def make_store(folder: Path, documents: list[str]) -> TokenStore:
    """Return a store of bytes, whose ids are few and so repeat."""
    files = []
    for number, text in enumerate(documents):
        files.append(folder.with_suffix(f".{number}.txt"))
        files[-1].write_text(text)
    prepare([str(file) for file in files], folder, tokenizer=load_tokenizer("bytes"))
    return TokenStore.open(folder)


def plain_count(train: TokenStore, document: list[int]) -> tuple[int, int]:
    """Count by comparing every run with every run."""
    text = train.tokens.tolist()
    known = {tuple(text[at : at + LENGTH]) for at in range(len(text) - LENGTH + 1)}
    runs = [tuple(document[at : at + LENGTH]) for at in range(len(document) - LENGTH + 1)]
    return sum(run in known for run in runs), len(runs)


def test_every_run_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_overlap, "_CHUNK", 7)  # runs across the ends of chunks, too
    draw = random.Random(0)
    texts = ["".join(draw.choice("abc") for _ in range(size)) for size in (60, 30, 3, 40)]
    train, held_out = make_store(tmp_path / "train", texts[:1]), make_store(tmp_path / "held-out", texts[1:])
    ends = [*held_out.documents[1:, 0].tolist(), len(held_out.tokens)]
    documents = [
        held_out.tokens[begin + 1 : end].tolist() for begin, end in zip(held_out.documents[:, 0], ends, strict=True)
    ]
    found = find_overlap(train, held_out, LENGTH)
    assert found == [plain_count(train, document) for document in documents]
    assert 0 < found[0][0] < found[0][1]
    assert found[1] == (0, 0)  # shorter than a run


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "What stands in both is found, whoever wrote it first."
    train = make_store(tmp_path / "train", [f"Before. {text} After."])
    make_store(tmp_path / "held-out", [text, "Nothing of this stands there, as far as anyone can see."])
    assert main([str(train.path), str(tmp_path / "held-out"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["documents without any"] == 1
    assert row["most by document"] == [{"document": 0, "share": 1.0}]
