"""Text as a task: rows are windows of the stream, epochs are kept, and what is wrong is said in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.slow import slow
from tra.presets import preset
from tra.tasks import Batch, generator
from tra.text import VOCABULARIES, Tokenizer, load_tokenizer, shipped_text
from tra.text.store import StoreWriter, TokenPart
from tra.text.task import HELD_OUT, Stream, Text
from tra.text.windows import windows_per_epoch
from tra.training import train

CPU = torch.device("cpu")
WINDOW = 8
WORDS = ("every good boy ", "deserves favour, and so does every girl. ", "")


def write_store(folder: Path, tokenizer: Tokenizer, *texts: str, ids: tuple[int, ...] = ()) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with StoreWriter(folder, tokenizer) as writer:
        for text, encoded in zip(texts, tokenizer.encode_many(texts), strict=True):
            writer.add(TokenPart(True, encoded, len(text.encode()), len(text.split())))
        if ids:
            writer.add(TokenPart(True, np.array(ids), len(ids), len(ids)))
        writer.seal([])
    return folder


@pytest.fixture
def corpus(tmp_path: Path, plain_bytes: Tokenizer) -> Path:
    """Stores named train and valid; documents of train, one of them empty, follow each other."""
    write_store(tmp_path / "corpus" / "train", plain_bytes, *(word * 5 for word in WORDS), "the end")
    write_store(tmp_path / "corpus" / "valid", plain_bytes, "another text of more than two windows")
    return tmp_path / "corpus"


def assert_windows(batch: Batch, stream: Stream, window: int) -> None:
    """Every row is somewhere in the stream, and its targets are one further on."""
    everywhere = {tuple(stream.tokens[i : i + window + 1].tolist()) for i in range(len(stream.tokens) - window)}
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        assert tokens[1:] == targets[:-1]
        assert (*tokens, targets[-1]) in everywhere
    assert batch.tokens.shape == batch.targets.shape == batch.loss_mask.shape
    assert batch.tokens.shape[1] == window
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.loss_mask.all()


def test_rows_are_windows_of_the_stream(corpus: Path) -> None:
    task = Text(str(corpus), window=WINDOW)
    assert_windows(task.training_rows(0, 3, 50, CPU), task.stream("train"), WINDOW)
    for split in task.splits:
        assert task.size(split) == WINDOW
        assert_windows(task.sample(split, 200, generator(0, "x")), task.stream(split), WINDOW)


def test_samples_reach_both_ends(corpus: Path) -> None:
    task = Text(str(corpus), window=WINDOW)
    tokens = task.stream("valid").tokens.tolist()
    drawn = task.sample("valid", 2000, generator(0, "x"))
    assert tokens[:WINDOW] in drawn.tokens.tolist()
    assert tokens[-WINDOW:] in drawn.targets.tolist()


def test_draws_are_one_long_row_of_epochs(corpus: Path) -> None:
    """However many rows a draw has, and from whichever draw a run goes on."""
    whole = Text(str(corpus), window=WINDOW).training_rows(7, 0, 120, CPU)
    for rows in (1, 24, 40):
        task = Text(str(corpus), window=WINDOW)  # what was drawn before is not remembered
        for draw in reversed(range(120 // rows)):
            piece = task.training_rows(7, draw, rows, CPU)
            for mine, all_of_them in zip(piece, whole, strict=True):
                assert torch.equal(mine, all_of_them[draw * rows : (draw + 1) * rows])
    assert not torch.equal(task.training_rows(8, 0, 120, CPU).tokens, whole.tokens)


def test_an_epoch_has_every_token_once(tmp_path: Path, plain_bytes: Tokenizer) -> None:
    """In a text that has every id but once, so that ids are places."""
    write_store(tmp_path / "store", plain_bytes, ids=tuple(range(250)))
    task = Text(str(tmp_path / "store"), window=WINDOW)
    each = windows_per_epoch(251, WINDOW)
    for number in range(3):
        targets = task.training_rows(0, number, each, CPU).targets.flatten().sort().values
        assert torch.equal(targets, torch.arange(len(targets)) + targets[0])
        assert 251 - len(targets) < 2 * WINDOW


def test_a_single_store_is_for_training_alone(tmp_path: Path, plain_bytes: Tokenizer) -> None:
    task = Text(str(write_store(tmp_path / "store", plain_bytes, WORDS[1])), window=WINDOW)
    assert task.stream("train").name == "store"
    with pytest.raises(ValueError, match=r"store has no store named valid"):
        task.stream("valid")


def test_the_shipped_text_is_split_without_overlap() -> None:
    task, tokenizer = Text(), load_tokenizer("bytes")
    streams = [task.stream(split) for split in ("train", "valid")]
    parts = [tokenizer.decode(stream.tokens) for stream in streams]
    assert "".join(parts) == shipped_text().read_text(encoding="utf-8")
    assert len(parts[1]) / len("".join(parts)) == pytest.approx(HELD_OUT, abs=0.01)
    for stream, part in zip(streams, parts, strict=True):
        assert stream.tokens[0] == stream.separator
        assert stream.separator not in stream.tokens[1:]
        assert stream.documents.tolist() == [[0, len(part.encode()), len(part.split())]]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_vocabulary_is_rounded_up(name: str) -> None:
    task = Text(tokenizer=name)
    assert task.vocab_size % 64 == 0
    assert 0 <= task.vocab_size - VOCABULARIES[name] < 64
    assert len(task.vocabulary) == VOCABULARIES[name]
    assert task.vocabulary[-1] == "<sep>"


def test_rows_read_as_text() -> None:
    task = Text(window=64)
    (row,) = task.training_rows(0, 0, 1, CPU).tokens
    assert task.render(row) in shipped_text().read_text(encoding="utf-8")


def damage(store: Path) -> None:
    raw = bytearray((store / "tokens.bin").read_bytes())
    raw[-1] ^= 1
    (store / "tokens.bin").write_bytes(raw)


BAD = {
    "missing": "there is no token store {}; tra prepare makes one",
    "empty": "{} is not a token store (no manifest.json in it)",
    "gpt2": "was made with the tokenizer 'gpt2', not 'bytes'",
    "outside": "outside holds the id 300, outside of the vocabulary's 0..256",
    "short": "windows of 8 tokens need a text of at least 16, short has 15",
    "damaged": "tokens.bin is damaged: its contents don't match the manifest's checksum",
}


@pytest.fixture
def stores(tmp_path: Path, plain_bytes: Tokenizer, gpt2: Tokenizer) -> Path:
    """A folder of stores, each with what its name says."""
    folder = tmp_path / "stores"
    write_store(folder / "gpt2", gpt2, WORDS[1] * 9)
    write_store(folder / "outside", plain_bytes, ids=(300,) * 100)
    write_store(folder / "short", plain_bytes, "x" * 14)
    write_store(folder / "damaged", plain_bytes, WORDS[1])
    damage(folder / "damaged")
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize("name", BAD)
def test_bad_stores(stores: Path, name: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is looked at below
        Text(str(stores / name), window=WINDOW).training_rows(0, 0, 10, CPU)
    assert BAD[name].format(stores / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_arguments() -> None:
    for arguments, message in (
        ({"tokenizer": "gpt"}, "unknown tokenizer 'gpt': did you mean 'gpt2'"),
        ({"window": 0}, "window must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Text(**arguments)
    with pytest.raises(ValueError, match="unknown split of text 'test'"):
        Text().stream("test")


def test_the_shortest_text_that_will_do(tmp_path: Path, plain_bytes: Tokenizer) -> None:
    task = Text(str(write_store(tmp_path / "store", plain_bytes, "x" * 15)), window=WINDOW)
    assert_windows(task.training_rows(0, 0, 5, CPU), task.stream("train"), WINDOW)


def tra(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tra", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "120"},
        check=False,
    )


def assert_one_line(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("tra: ")
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert message in done.stderr


TINY = (
    "model.d_model=16",
    "model.n_layers=1",
    "train.batch_size=2",
    "train.steps=1",
    f"task.arguments.window={WINDOW}",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_training_on_it_is_one_clear_line(stores: Path, name: str) -> None:
    data = f"task.arguments.data=stores/{name}"
    done = tra("train", "--preset", "text-demo", *TINY, data, "--out", "run", cwd=stores.parent)
    assert_one_line(done, BAD[name].format(f"stores/{name}"))
    assert (stores.parent / "run").exists() == (name == "outside")  # which shows only when it is read


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(preset("text-demo").override(TINY), folder, device=CPU)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "stores/gpt2"), "gpt2 has the tokenizer 'gpt2', the run 'bytes'"),
        *slow(
            (("--text", "stores/missing"), BAD["missing"].format("stores/missing")),
            (("--text", "stores/outside", "--windows", "8"), BAD["outside"]),
            (
                ("--text", "stores/short", "--windows", "8", "15"),
                "a window of 15 tokens is longer than short, which has 14",
            ),
            (("--text", "stores/damaged"), BAD["damaged"]),
            (("--windows", "7", "--overlap", "half"), "even to overlap by half, got 7"),
            (("--windows", "0"), "a window must be at least 1"),
            (("--examples", "3"), "--splits, --examples and --rows are for tasks; this run learnt text"),
            (("--text", "stores/short", "stores/../stores/short"), "two texts have the same name"),
            (("--maps", "-1"), "--maps must not be negative, got -1"),
        ),
    ],
)
def test_evaluating_it_is_one_clear_line(stores: Path, trained: Path, arguments: tuple[str, ...], message: str) -> None:
    shutil.copytree(trained, stores.parent / "run")
    assert_one_line(tra("evaluate", "run", *arguments, cwd=stores.parent), message)
    assert not (stores.parent / "run" / "perplexity.jsonl").exists()
