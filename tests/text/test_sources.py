"""Documents of every format, and what is said of sources that can't be read."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.data import SMALL_WIKITEXT, real
from tests.text.test_tokenizer import TEXTS
from tra.text import Tokenizer, load_tokenizer, shipped_text
from tra.text import source_files as files
from tra.text.formats import DocumentSplitter, articles
from tra.text.sources import Source, TextPart, find_sources
from tra.text.store import TokenPart


def documents_of(sources: list[Source], tokenizer: Tokenizer | None = None) -> list[str]:
    found: list[str] = []
    tokenizer = tokenizer or load_tokenizer("bytes")
    for source in sources:
        for part in source.parts(tokenizer, lambda _: None):
            text = part.text if isinstance(part, TextPart) else tokenizer.decode(part.ids)
            if part.begins:
                found.append("")
            found[-1] += text
    return found


def documents(*names: str | Path, form: str = "auto") -> list[str]:
    splits = find_sources(names, form)
    assert list(splits) == [""]
    return documents_of(splits[""])


def test_articles_of_wikitext() -> None:
    found = documents(SMALL_WIKITEXT)
    assert [text.splitlines()[1] for text in found] == [" = Threshold gate = ", " = E = mc² ( song ) = ", " = K = "]
    assert "".join(found).encode() == SMALL_WIKITEXT.read_bytes()


def test_articles_with_their_spacing_undone() -> None:
    text = "= A-b =\n\nText.\n\n== C ==\n\nL\n= 1 henry and C =\n1 farad\n\n= D =\n\nText.\n"
    lines = [(begins, line.strip()) for begins, line in articles(text.splitlines(keepends=True))]
    assert [place for place, (begins, _) in enumerate(lines) if begins] == [0, 9]
    assert lines[10] == (False, "= D =")


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("", []),
        ("no heading\n", [0]),
        (" \n \n = A = \n \n b \n", [0]),
        ("preface\n \n = A = \n \n b \n", [0, 1]),
        (" \n = A = \n \n b \n \n = C = \n", [0, 4]),
        (" \n = A = \n \n b \n = C = \n \n", [0]),
        (" \n = A = \n \n b \n \n = C = \n d \n", [0]),
        (" \n = A = \n \n \n = = B = = \n \n", [0]),
        (" \n = A = \n \n b \n \n = = \n \n", [0]),
        (" \n = A = \n \n \n = B", [0]),
    ],
)
def test_where_articles_begin(text: str, starts: list[int]) -> None:
    lines = text.splitlines(keepends=True)
    assert [place for place, (begins, _) in enumerate(articles(lines)) if begins] == starts
    assert "".join(line for _, line in articles(lines)) == text


@pytest.mark.parametrize(
    ("name", "words", "tokens"),
    [
        ("wiki.valid.raw", 213_886, 249_887),
        ("wiki.test.raw", 241_211, 286_221),
        ("wiki.valid.detok.txt", 181_908, 237_516),
        ("wiki.test.detok.txt", 204_494, 271_970),
    ],
)
def test_the_real_wikitext(gpt2: Tokenizer, name: str, words: int, tokens: int) -> None:
    """Sixty articles each, and as many tokens as the whole file has when it is encoded at once."""
    path = real("wikitext") / name
    found = documents(path)
    assert len(found) == 60
    assert "".join(found).encode() == path.read_bytes()
    assert sum(len(text.split()) for text in found) == words
    assert sum(map(len, gpt2.encode_many(found))) == tokens
    pieces = [
        part.text for part in find_sources([path])[""][0].parts(gpt2, lambda _: None) if isinstance(part, TextPart)
    ]
    assert len(pieces) > 60
    assert np.array_equal(np.concatenate(gpt2.encode_many(pieces)), gpt2.encode(path.read_text()))


def test_splits_of_a_wikitext_folder(tmp_path: Path) -> None:
    for name in ("wiki.test.raw", "wiki.valid.raw", "wiki.train.raw", "wiki.valid.detok.txt", "notes.txt"):
        (tmp_path / name).write_bytes(SMALL_WIKITEXT.read_bytes())
    splits = find_sources([tmp_path])
    assert list(splits) == ["train", "valid", "test"]
    assert all(len(documents_of(sources)) == 3 for sources in splits.values())
    assert splits["valid"][0].facts()[0]["name"] == "wiki.valid.raw"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "wiki.valid.tokens.xz").write_bytes(lzma.compress(SMALL_WIKITEXT.read_bytes()))
    assert len(documents(tmp_path / "one")) == 3
    with pytest.raises(ValueError, match=r"has splits of its own \(train, valid, test\), so it is prepared alone"):
        find_sources([tmp_path, SMALL_WIKITEXT])


def test_text_files_are_documents(tmp_path: Path) -> None:
    raw = "Zürich\r\n\x85 line\u2028 end"
    (tmp_path / "b.txt").write_bytes(raw.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(b"last"))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "README.md").write_bytes(b"not one of them")
    assert documents(tmp_path) == ["first", raw, "last"]
    assert documents(tmp_path / "c.txt.xz", tmp_path / "b.txt") == ["last", raw]
    assert documents(tmp_path / "README.md", form="text") == ["not one of them"]
    assert documents(SMALL_WIKITEXT, form="text") == [SMALL_WIKITEXT.read_text()]


def test_json_lines(tmp_path: Path) -> None:
    texts = ["one\u2028line", "two\nlines", "", "ünï"]
    lines = "".join(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n" for text in texts) + "\n"
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    wanted = [text for text in texts if text]
    assert documents(tmp_path) == 3 * wanted
    assert documents(tmp_path / "c.jsonl.gz") == wanted


def test_json_lines_with_titles(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "A", "text": "b"}\n{"title": "C", "text": "d\\n"}\n')
    wanted = ["= A =\n\nb\n", "= C =\n\nd\n\n"]
    assert documents(tmp_path / "a.jsonl", form="jsonl-titled") == wanted
    assert documents(tmp_path, form="jsonl-titled") == wanted
    (tmp_path / "a.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(ValueError, match=r'a\.jsonl, line 1: no field "title" that is a string'):
        documents(tmp_path / "a.jsonl", form="jsonl-titled")


def test_the_real_held_out_articles(gpt2: Tokenizer) -> None:
    """Titled as those of the training stream are; with a separator each, as many tokens as their makers counted."""
    found = documents(real("enwiki2015") / "valid.jsonl.xz", form="jsonl-titled")
    assert len(found) == 120
    assert sum(map(len, gpt2.encode_many(found))) + 120 == 443_489


@pytest.fixture(params=[3, 2**16])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether blocks cut characters, ids and documents or not."""
    monkeypatch.setattr(files, "BLOCK_BYTES", request.param)


@pytest.mark.usefixtures("blocks")
def test_token_streams(tmp_path: Path) -> None:
    def write(name: str, *ids: int) -> None:
        (tmp_path / name).write_bytes(np.array(ids, dtype="<u2").tobytes())

    write("0.bin", 256, 97, 98, 256, 99)
    write("1.bin", 100, 256, 256, 32, 101, 256)
    assert documents(tmp_path) == ["ab", "cd", " e"]
    (tmp_path / "0.bin.xz").write_bytes(lzma.compress((tmp_path / "0.bin").read_bytes()))
    assert documents(tmp_path / "0.bin.xz", tmp_path / "1.bin") == ["ab", "cd", " e"]
    write("2.bin", 97, 256, 98, 256)  # the separator after each document instead
    assert documents(tmp_path / "2.bin") == ["a", "b"]
    parts = find_sources([tmp_path / "1.bin"])[""][0].parts(load_tokenizer("bytes"), lambda _: None)
    counts = [(part.begins, part.bytes, part.words) for part in parts if isinstance(part, TokenPart)]
    assert sum(bytes for _, bytes, _ in counts) == 3
    assert sum(words for _, _, words in counts) == 2


@pytest.mark.usefixtures("blocks")
def test_blocks_do_not_show(tmp_path: Path) -> None:
    text = "漢字 🙂\n" * 5
    (tmp_path / "a.txt").write_text(text)
    assert documents(tmp_path / "a.txt") == [text]
    assert len(documents(SMALL_WIKITEXT)) == 3


@given(text=TEXTS, blocks=st.integers(1, 4))
def test_pieces_have_the_tokens_of_the_whole(gpt2: Tokenizer, text: str, blocks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tra.text.formats.PART_CHARACTERS", 1)
        cutter = DocumentSplitter()
        size = -(-len(text) // blocks) or 1
        pieces = [piece for at in range(0, len(text), size) for piece in cutter.add(text[at : at + size])]
        pieces += cutter.end()
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.begins for piece in pieces] == [place == 0 for place in range(len(pieces))]
    together = [index for piece in pieces for index in gpt2.encode(piece.text)]
    assert together == gpt2.encode(text)
    assert sum(len(piece.text.encode().split()) for piece in pieces) == len(text.encode().split())


def test_a_long_text_is_cut_and_keeps_its_tokens(gpt2: Tokenizer) -> None:
    text = shipped_text().read_text()
    cutter = DocumentSplitter()
    pieces = [*cutter.add(text), *cutter.end()]
    assert len(pieces) == 10
    assert np.array_equal(np.concatenate(gpt2.encode_many([piece.text for piece in pieces])), gpt2.encode(text))


def test_text_without_a_place_to_cut_stays_whole() -> None:
    cutter = DocumentSplitter()
    pieces = [piece for _ in range(5) for piece in cutter.add("x" * 10_000)]
    assert not pieces
    assert [len(piece.text) for piece in cutter.end()] == [50_000]


class Rows(list[dict[str, str]]):
    column_names = ("text",)


def pretend_hub(monkeypatch: pytest.MonkeyPatch, load: object) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_the_hub_gives_the_articles_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are the lines of the raw files, blank ones emptied."""
    lines = SMALL_WIKITEXT.read_text().splitlines(keepends=True)
    rows = Rows({"text": line if line.strip() else ""} for line in lines)
    asked = []

    def load(name: str, config: str | None) -> dict[str, Rows]:
        asked.append((name, config))
        return {"test": rows, "train": rows, "validation": rows}

    pretend_hub(monkeypatch, load)
    splits = find_sources(["hub:Salesforce/wikitext:wikitext-103-raw-v1"])
    assert asked == [("Salesforce/wikitext", "wikitext-103-raw-v1")]
    assert list(splits) == ["train", "valid", "test"]
    assert documents_of(splits["valid"]) == documents(SMALL_WIKITEXT)
    (facts,) = splits["valid"][0].facts()
    assert facts["bytes"] == SMALL_WIKITEXT.stat().st_size


def test_other_rows_of_the_hub_are_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_hub(monkeypatch, lambda name, config: {"train": Rows([{"text": "a"}, {"text": "b"}])})
    assert documents("hub:some/stories") == ["a", "b"]


def test_a_hub_out_of_reach_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, config: str | None) -> None:
        raise ConnectionError("no route\nto host")

    pretend_hub(monkeypatch, load)
    with pytest.raises(ValueError, match=r"^hub:a/b can't be loaded: no route$"):
        find_sources(["hub:a/b"])
    pretend_hub(monkeypatch, lambda name, config: {"other": Rows()})
    with pytest.raises(ValueError, match="hub:a/b has no splits of rows with a text"):
        find_sources(["hub:a/b"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="hub:a/b needs the datasets library"):
        find_sources(["hub:a/b"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\xffc", r"a\.txt is not UTF-8 text: byte 2 can't be decoded"),
        ("a.txt", "日本".encode()[:-1], r"a\.txt is not UTF-8 text: byte 3 can't be decoded"),
        ("a.txt.gz", b"not gzip", r"a\.txt\.gz is damaged: "),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], r"a\.txt\.gz is damaged: "),
        ("a.txt.xz", lzma.compress(b"text" * 99)[:-9], r"a\.txt\.xz is damaged: "),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: not JSON \("),
        ("a.jsonl", b'{"text": "a"}\n\n{"texts": "a"}\n', r'a\.jsonl, line 3: no field "text" that is a string'),
        ("a.jsonl", b"[]\n", r'a\.jsonl, line 1: no field "text" that is a string'),
        ("a.jsonl", b'{"text": 5}\n', r'a\.jsonl, line 1: no field "text" that is a string'),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl, line 1: half a surrogate pair"),
        ("a.bin", b"a\0\x01\x02\x01\x01", r"a\.bin is not a stream of bytes tokens: id 513 at place 1, of a voc.* 257"),
        ("a.bin", b"a\0a", r"a\.bin is not a stream of uint16 tokens: it has an odd number of bytes"),
        ("a.csv", b"a", r"the name of .*a\.csv doesn't tell its format: give --format wikitext \| text \| jsonl"),
    ],
)
@pytest.mark.usefixtures("blocks")
def test_what_cant_be_read_is_one_clear_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        documents(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_unclear_sources(tmp_path: Path) -> None:
    for names, message in (
        ([], "there is nothing to prepare"),
        ([tmp_path / "none"], "there is no file or folder .*none"),
        ([tmp_path], r"holds no wiki\.\*\.raw, \.txt, \.jsonl or \.bin files"),
    ):
        with pytest.raises(ValueError, match=message):
            find_sources(names)
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(ValueError, match="holds text and jsonl files: say with --format which to take"):
        find_sources([tmp_path])
    with pytest.raises(ValueError, match="holds no wikitext files"):
        find_sources([tmp_path], "wikitext")
    with pytest.raises(ValueError, match="unknown format 'csv': known are auto"):
        find_sources([tmp_path], "csv")
    assert len(find_sources([tmp_path], "jsonl")[""]) == 1
