"""Preparation: the same bytes however it is done, and all of a store or nothing, whatever happens."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prepare import bench_prepare
from tests.text.data import SMALL_WIKITEXT, real
from tra.cli.main import main
from tra.text import Tokenizer, TokenStore, shipped_text
from tra.text.prepare import prepare


def tra(*arguments: str | Path, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-m", "tra", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, **options
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_store_of_the_shipped_text(gpt2: Tokenizer, tmp_path: Path) -> None:
    seen = []
    manifests = prepare([shipped_text()], tmp_path / "a/b", tokenizer=gpt2, progress=lambda *done: seen.append(done))
    store = TokenStore.open(tmp_path / "a/b")
    assert manifests == {str(tmp_path / "a/b"): store.manifest}
    text = shipped_text().read_text()
    assert store.tokens.tolist() == [gpt2.separator, *gpt2.encode(text)]
    assert store.documents.tolist() == [[0, len(text.encode()), len(text.split())]]
    assert seen[-1] == ("b", len(text.encode()), len(text.encode()))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b"]
    assert str(tmp_path) not in (tmp_path / "a/b/manifest.json").read_text()


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_jobs_do_not_show(
    name: str, gpt2: Tokenizer, plain_bytes: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = {"gpt2": gpt2, "bytes": plain_bytes}[name]
    lines = shipped_text().read_text().split("\n\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    sources = [tmp_path / "a.jsonl", shipped_text(), SMALL_WIKITEXT]
    monkeypatch.setattr("tra.text.encode.BATCH_CHARACTERS", 2**12)  # many under way at a time
    made = []
    for jobs in (1, 2, 3, None):
        prepare(sources, tmp_path / f"{jobs}", tokenizer=tokenizer, jobs=jobs)
        made.append(tree(tmp_path / f"{jobs}"))
    assert made[0] == made[1] == made[2] == made[3]
    assert json.loads(made[0]["manifest.json"])["documents"] == sum(map(bool, lines)) + 1 + 3


def test_splits_become_stores(gpt2: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "wikitext").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / f"wikitext/wiki.{split}.raw").write_bytes(SMALL_WIKITEXT.read_bytes())
    manifests = prepare([tmp_path / "wikitext"], tmp_path / "out", tokenizer=gpt2)
    assert [Path(path).name for path in manifests] == ["train", "valid", "test"]
    store = TokenStore.open(tmp_path / "out/test")
    assert store.manifest["documents"] == 3
    assert store.manifest["sources"][0]["name"] == "wiki.test.raw"
    assert (store.tokens[store.documents[:, 0]] == store.separator).all()
    (tmp_path / "wikitext/wiki.test.raw").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        prepare([tmp_path / "wikitext"], tmp_path / "again", tokenizer=gpt2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "wikitext"]
    with pytest.raises(ValueError, match=r"has splits of its own .* nothing to hold out"):
        prepare([tmp_path / "wikitext"], tmp_path / "again", tokenizer=gpt2, hold_out=1)


def test_the_real_wikitext(gpt2: Tokenizer, tmp_path: Path) -> None:
    prepare([real("wikitext")], tmp_path / "out", tokenizer=gpt2)
    store = TokenStore.open(tmp_path / "out/valid")
    counts = {"documents": 60, "words": 213_886, "tokens": 249_887 + 60, "bytes": 1_146_846}
    assert counts.items() <= store.manifest.items()


def test_holding_out(plain_bytes: Tokenizer, tmp_path: Path) -> None:
    texts = ["one", "two words", "and three words", "four"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=plain_bytes, hold_out=3)
    train, valid = (TokenStore.open(tmp_path / "out" / name) for name in ("train", "valid"))
    assert plain_bytes.decode(train.tokens) == "one"
    assert train.documents.tolist() == [[0, 3, 1]]
    assert plain_bytes.decode(valid.tokens) == "".join(texts[1:])
    assert valid.documents.tolist() == [[0, 9, 2], [10, 15, 3], [26, 4, 1]]
    assert valid.tokens[0] == valid.separator
    with pytest.raises(ValueError, match="can't hold out 4 of 4 documents: none would be left"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "none", tokenizer=plain_bytes, hold_out=4)


def test_a_stream_becomes_the_store_it_came_from(gpt2: Tokenizer, tmp_path: Path) -> None:
    prepare([SMALL_WIKITEXT], tmp_path / "one", tokenizer=gpt2)
    prepare([tmp_path / "one/tokens.bin"], tmp_path / "two", tokenizer=gpt2)
    one, two = (TokenStore.open(tmp_path / name) for name in ("one", "two"))
    assert np.array_equal(one.tokens, two.tokens)
    assert np.array_equal(one.documents, two.documents)  # words too


def test_what_is_there_is_kept_unless_told_otherwise(plain_bytes: Tokenizer, tmp_path: Path) -> None:
    def make(**options: bool) -> None:
        prepare([source], tmp_path / "out", tokenizer=plain_bytes, **options)  # type: ignore[arg-type]

    (source := tmp_path / "a.txt").write_text("first")
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    make()
    source.write_text("second")
    with pytest.raises(ValueError, match="out exists already: use --overwrite to replace it"):
        make()
    make(overwrite=True)
    assert plain_bytes.decode(TokenStore.open(tmp_path / "out").tokens) == "second"
    source.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        make(overwrite=True)
    assert plain_bytes.decode(TokenStore.open(tmp_path / "out").tokens) == "second"
    source.write_text("third")
    (tmp_path / "out/notes.md").write_text("mine")
    with pytest.raises(ValueError, match=r"not only a token store \(notes\.md is in it\), so it is not overwritten"):
        make(overwrite=True)
    (tmp_path / "out/notes.md").unlink()
    prepare([SMALL_WIKITEXT], tmp_path / "out", tokenizer=plain_bytes, overwrite=True, hold_out=1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train", "valid"]
    make(overwrite=True)
    assert plain_bytes.decode(TokenStore.open(tmp_path / "out").tokens) == "third"
    for kind in (Path.mkdir, Path.touch):
        (tmp_path / "thesis").mkdir(exist_ok=True)
        kind(tmp_path / "thesis/train")
        with pytest.raises(ValueError, match=r"not only a token store \(train is in it\)"):
            prepare([source], tmp_path / "thesis", tokenizer=plain_bytes, overwrite=True)
        (tmp_path / "thesis/train").rename(tmp_path / f"{kind.__name__}")
    with pytest.raises(ValueError, match=r"a\.txt is not only a token store"):
        prepare([source], source, tokenizer=plain_bytes, overwrite=True)
    assert source.read_text() == "third"


def test_one_preparation_at_a_time(plain_bytes: Tokenizer, tmp_path: Path) -> None:
    def meanwhile(*_: object) -> None:
        with pytest.raises(ValueError, match="out is being prepared by another process"):
            prepare([SMALL_WIKITEXT], tmp_path / "out", tokenizer=plain_bytes)

    prepare([SMALL_WIKITEXT], tmp_path / "out", tokenizer=plain_bytes, progress=meanwhile)
    TokenStore.open(tmp_path / "out")


def test_a_target_that_came_meanwhile_is_kept(plain_bytes: Tokenizer, tmp_path: Path) -> None:
    def meanwhile(*_: object) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/thesis.tex").touch()

    with pytest.raises(ValueError, match="out exists already"):
        prepare([SMALL_WIKITEXT], tmp_path / "out", tokenizer=plain_bytes, progress=meanwhile)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "thesis.tex"]


@contextmanager
def half_prepared(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`tra prepare` of a source that has given some of its text and then nothing."""
    os.mkfifo(folder / "endless.txt")
    command = [sys.executable, "-m", "tra", "prepare", "endless.txt", "out", "--jobs", "2"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        with (folder / "endless.txt").open("wb") as source:
            source.write(20 * shipped_text().read_bytes())
            source.flush()
            written = folder / ".out.preparing/store/tokens.bin"
            deadline = time.monotonic() + 60
            while not (written.exists() and written.stat().st_size):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.01)
            yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_killed_it_leaves_no_store_and_the_next_one_clears_up(tmp_path: Path, plain_bytes: Tokenizer) -> None:
    with half_prepared(tmp_path) as process:
        process.kill()
        process.wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == [".out.preparing", "endless.txt"]
    prepare([SMALL_WIKITEXT], tmp_path / "out", tokenizer=plain_bytes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["endless.txt", "out"]
    assert len(TokenStore.open(tmp_path / "out").documents) == 3


@pytest.mark.slow
def test_interrupted_it_leaves_nothing(tmp_path: Path) -> None:
    with half_prepared(tmp_path) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error.strip() == "tra: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["endless.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_full_disk_is_one_clear_line(tmp_path: Path, jobs: str) -> None:
    """As full as an unprivileged test can make it: files end at 50,000 bytes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = tra("prepare", shipped_text(), "out", "--jobs", jobs, cwd=tmp_path, preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr.strip() == "tra: the disk is full (File too large), writing out; nothing is left of it"
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path) -> None:
    done = tra("prepare", SMALL_WIKITEXT, shipped_text(), "out", "--hold-out", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "out/train: 2 documents, 143 words, 212 tokens",
        "out/valid: 2 documents, 26,461 words, 42,569 tokens",
    ]
    told = tra("prepare", SMALL_WIKITEXT, "out", "--overwrite", "--tokenizer", "bytes", "--json", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    manifests = json.loads(told.stdout)
    assert manifests == {"out": json.loads((tmp_path / "out/manifest.json").read_text())}
    assert manifests["out"]["tokenizer"]["name"] == "bytes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say what to prepare, and where the store goes: tra prepare SOURCE ... DIR"),
        (("a.txt",), "say what to prepare, and where the store goes"),
        (("none.txt", "out"), "there is no file or folder none.txt"),
        (("bad.txt", "out"), "bad.txt is not UTF-8 text: byte 3 can't be decoded"),
        (("bad.jsonl", "out"), "bad.jsonl, line 2: not JSON"),
        (("textless.jsonl", "out"), 'textless.jsonl, line 1: no field "text"'),
        (("bad.bin", "out"), "bad.bin is not a stream of gpt2 tokens: id 65,535 at place 0"),
        (("empty.txt", "out"), "empty.txt: there is no text in it"),
        (("empty.txt", "blank.jsonl", "out"), "no text in any of empty.txt, blank.jsonl"),
        (("a.csv", "out"), "the name of a.csv doesn't tell its format: give --format"),
        (("a.txt", "exists"), "exists already: use --overwrite to replace it"),
        (("a.txt", "exists", "--overwrite"), "not only a token store (thesis.tex is in it), so it is not overwritten"),
        (("a.txt", "a.csv/out"), "a.csv"),
        (("a.txt", "out", "--jobs", "0"), "jobs must be at least 1, got 0"),
        (("a.txt", "out", "--hold-out", "-1"), "hold_out must not be negative, got -1"),
        (("a.txt", "out", "--hold-out", "1"), "can't hold out 1 of 1 documents"),
        (("a.txt", "out", "--tokenizer-files", "exists"), "exists holds no GPT-2 tokenizer"),
    ],
)
def test_bad_input_gets_one_clear_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    for name, content in {
        "a.txt": b"text",
        "a.csv": b"text",
        "bad.txt": b"abc\xff",
        "bad.jsonl": b'{"text": "a"}\n{"text": "a"\n',
        "textless.jsonl": b'{"id": 1}\n',
        "blank.jsonl": b'\n{"text": ""}\n',
        "bad.bin": b"\xff\xff",
        "empty.txt": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "exists").mkdir()
    (tmp_path / "exists/thesis.tex").touch()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tra", "prepare", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1, error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "csv"), "invalid choice 'csv'"),
        (("--tokenizer", "gpt3"), "invalid choice 'gpt3'"),
        (("--overwrit",), "Unrecognized options: --overwrit: did you mean --overwrite?"),
    ],
)
def test_what_does_not_parse_is_one_clear_line(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = tra("prepare", shipped_text(), "out", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.timing
def test_memory_does_not_grow_with_the_text() -> None:
    short, long = bench_prepare(megabytes=(5, 50))["rows"]
    assert long["megabytes"] > 9 * short["megabytes"]
    assert long["peak_mib"] < short["peak_mib"] + 16
