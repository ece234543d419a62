"""A token store: what is in it, and what is said when it isn't one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tra.text import VOCABULARIES, Tokenizer, TokenStore
from tra.text.prepare import prepare
from tra.text.store import StoreWriter, TokenPart


@pytest.fixture
def folder(plain_bytes: Tokenizer, tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "store", plain_bytes) as writer:
        writer.add(TokenPart(True, np.array([97, 32]), 2, 1))
        writer.add(TokenPart(False, np.array([98]), 1, 1))
        writer.add(TokenPart(True, np.array([99]), 1, 1))
        writer.seal([{"name": "a.txt", "bytes": 4, "sha256": "…"}])
    return tmp_path / "store"


def test_what_is_in_it(folder: Path, plain_bytes: Tokenizer) -> None:
    store = TokenStore.open(folder)
    assert store.tokens.tolist() == [256, 97, 32, 98, 256, 99]
    assert store.tokens.dtype == np.uint16
    assert not store.tokens.flags.writeable
    assert store.documents.tolist() == [[0, 3, 2], [4, 1, 1]]
    assert store.documents.dtype == np.int64
    assert (store.name, store.tokenizer_name, store.fingerprint) == ("store", "bytes", plain_bytes.fingerprint)
    assert (store.separator, store.vocab_size) == (256, 257)
    counts = {"tokens": 6, "documents": 2, "words": 3, "bytes": 4}
    assert counts.items() <= store.manifest.items()
    assert store.manifest["sources"][0]["name"] == "a.txt"


def test_a_wide_vocabulary_gets_wide_tokens(
    tmp_path: Path, plain_bytes: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VOCABULARIES, "bytes", 100_000)
    with StoreWriter(tmp_path / "wide", plain_bytes) as writer:
        writer.add(TokenPart(True, np.array([99_998]), 1, 1))
        writer.seal([])
    store = TokenStore.open(tmp_path / "wide")
    assert store.tokens.dtype == np.uint32
    assert store.tokens.tolist() == [99_999, 99_998]


def test_unknown_words_stay_unknown(tmp_path: Path, plain_bytes: Tokenizer) -> None:
    with StoreWriter(tmp_path / "store", plain_bytes) as writer:
        writer.add(TokenPart(True, np.array([97]), 1, -1))
        writer.add(TokenPart(True, np.array([97]), 1, 1))
        writer.seal([])
    store = TokenStore.open(tmp_path / "store")
    assert store.documents[:, 2].tolist() == [-1, 1]
    assert store.manifest["words"] is None


def flip_last_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def rewrite(**changes: object) -> object:
    def change(path: Path) -> None:
        manifest = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))

    return change


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("tokens.bin", flip_last_bit, r"tokens\.bin is damaged: its contents don't match the manifest's checksum"),
        ("tokens.bin", cut_short, r"tokens\.bin is damaged: 10 bytes instead of 12"),
        ("tokens.bin", Path.unlink, r"is damaged: tokens\.bin is missing"),
        ("documents.npy", flip_last_bit, r"documents\.npy is damaged: its contents"),
        ("documents.npy", cut_short, r"documents\.npy is damaged: "),
        ("documents.npy", lambda path: path.write_bytes(b""), r"documents\.npy is damaged: "),
        ("documents.npy", lambda path: np.save(path, np.zeros((1, 3))), r"documents\.npy is damaged: shape \(1, 3\)"),
        ("documents.npy", Path.unlink, r"is damaged: documents\.npy is missing"),
        ("manifest.json", cut_short, r"manifest\.json is damaged, or not that of a token store"),
        ("manifest.json", lambda path: path.write_text("[]"), r"manifest\.json is damaged, or not that"),
        ("manifest.json", rewrite(tokenizer="gpt2"), r"manifest\.json is damaged, or not that"),
        ("manifest.json", rewrite(tokens=None), r"manifest\.json is damaged: it has no 'tokens'"),
        ("manifest.json", rewrite(format=2), r"is a store of format 2, this version of tra reads up to 1"),
        ("manifest.json", Path.unlink, r"is not a token store \(no manifest\.json in it\)"),
    ],
)
def test_damage_is_one_clear_line(folder: Path, file: str, damage: object, message: str) -> None:
    assert callable(damage)
    damage(folder / file)
    with pytest.raises(ValueError, match=message) as caught:
        TokenStore.open(folder)
    assert "\n" not in str(caught.value)


def test_checksums_are_looked_at_when_asked_or_cheap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_last_bit(folder / "tokens.bin")
    TokenStore.open(folder, verify=False)
    monkeypatch.setattr("tra.text.store.VERIFIED_BYTES", 0)
    TokenStore.open(folder)
    with pytest.raises(ValueError, match="checksum"):
        TokenStore.open(folder, verify=True)


def test_no_store_at_all(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no token store .*none; tra prepare makes one"):
        TokenStore.open(tmp_path / "none")
    shutil.copytree(folder, tmp_path / "corpus" / "train")
    with pytest.raises(ValueError, match=r"is not a token store .* it holds the stores train: name one"):
        TokenStore.open(tmp_path / "corpus")
    with pytest.raises(ValueError, match="is not a token store"):
        TokenStore.open(folder / "tokens.bin")


def test_splits_are_named_after_their_corpus(tmp_path: Path, plain_bytes: Tokenizer) -> None:
    """So that the validation texts of two corpora can stand in one table."""
    (tmp_path / "a.txt").write_text("some text")
    names = []
    for place in ("one/valid", "two/valid", "three"):
        prepare([tmp_path / "a.txt"], tmp_path / place, tokenizer=plain_bytes)
        names.append(TokenStore.open(tmp_path / place).name)
    assert names == ["one-valid", "two-valid", "three"]
