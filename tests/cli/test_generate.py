"""`tra generate`: runs go on at the prompt, text comes in whole characters, and bad input is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import CallTra, Command, output_or_error
from tra.cli.continuation import TextStream
from tra.presets import preset
from tra.runs import SHIPPED
from tra.training import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained, but for two steps: text, copy, and an LSTM; and what is left of runs after accidents."""
    folder = tmp_path_factory.mktemp("runs")
    small = ("model.d_model=32", "model.n_layers=1", "train.batch_size=4", "train.steps=2")
    for name, changes in (
        ("text-demo", ()),
        ("copy", ("task.arguments.longest=5", "train.compile=off", "train.log_every=1")),
        ("demo", ("model.mechanism=lstm", "task.arguments.length=16")),
    ):
        train(preset(name).override([*small, *changes]), folder / name, device=torch.device("cpu"))
    for name in ("unfinished", "truncated"):
        shutil.copytree(folder / "text-demo", folder / name)
    (folder / "unfinished/model.safetensors").unlink()
    weights = folder / "truncated/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.fixture
def command(call_tra: CallTra, monkeypatch: pytest.MonkeyPatch, runs: Path) -> Command:
    monkeypatch.chdir(runs)
    return lambda *arguments, **options: output_or_error(*call_tra("generate", *arguments, **options))


def rows_of(said: tuple[int, str]) -> list[dict[str, object]]:
    assert said[0] == 0
    return [json.loads(line) for line in said[1].splitlines()]


def test_a_task_goes_on(command: Command) -> None:
    """The run that ships knows flip-flop."""
    assert command("flipflop-tra", "--prompt", "w1i0i1r") == (0, "w1i0i1r1\n")
    assert command("flipflop-tra", "--prompt", "-", stdin=b"w1i0 i1w0i1r\n") == (0, "w1i0i1w0i1r0\n")
    (row,) = rows_of(command("flipflop-tra", "--prompt", "w0i1r", "--max-new-tokens", 3, "--seed", 4, "--json"))
    assert row["prompt"] == "w0i1r"
    assert row["continuation"] == "".join("wri01"[token] for token in row["tokens"])  # type: ignore[attr-defined]
    assert (row["continuation"][0], len(row["tokens"]), row["seed"]) == ("0", 3, 4)  # type: ignore[arg-type,index]


def test_test_sequences_up_to_their_answers(command: Command) -> None:
    rows = rows_of(command("flipflop-tra", "--number", 3, "--json"))
    assert len({row["prompt"] for row in rows}) == 3
    for row in rows:
        assert str(row["prompt"]).endswith("r")
        assert row["continuation"] == row["expected"] in ("0", "1")
    status, said = command("flipflop-tra")
    assert (status, said.splitlines()[1]) == (0, f"expected {rows[0]['expected']}")
    assert said.startswith(f"{rows[0]['prompt']}{rows[0]['expected']}\n")
    other = rows_of(command("flipflop-tra", "--seed", 1, "--json"))
    assert other[0]["prompt"] != rows[0]["prompt"]

    (row,) = rows_of(command("copy", "--json"))
    inside = str(row["prompt"]).removeprefix("<bos> ").removesuffix(" <sep>")
    assert row["expected"] == f"{inside} <eos>"
    assert len(row["tokens"]) <= len(str(row["expected"]).split())  # type: ignore[arg-type]
    (row,) = rows_of(command("copy", "--prompt", "<bos> c  a b <sep>", "--max-new-tokens", 4, "--json"))
    assert row["prompt"] == "<bos> c a b <sep>"
    first = str(row["continuation"]).split()[0]
    assert command("copy", "--prompt", "<bos> c a b <sep>", "--stop", first) == (0, "<bos> c a b <sep>\n")
    assert len(rows_of(command("demo", "--json"))) == 1


def test_a_language_model_goes_on(command: Command) -> None:
    asked = ("text-demo", "--prompt", "Alicé 漢", "--max-new-tokens", 40, "--temperature", 2)
    first, again, other = (command(*asked, "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first[1].startswith("Alicé 漢")
    (row,) = rows_of(command(*asked, "--seed", 1, "--json"))
    assert len(row["tokens"]) <= 40  # type: ignore[arg-type]
    assert max(row["tokens"]) <= 256  # type: ignore[call-overload] # ids beyond have no bytes
    assert bytes(t for t in row["tokens"] if t < 256).decode(errors="replace").startswith(str(row["continuation"]))  # type: ignore[attr-defined]
    several = rows_of(command(*asked[:5], "--number", 3, "--top-p", 0.9, "--json"))
    assert len({str(row["tokens"]) for row in several}) == 3
    (alone,) = rows_of(command(*asked[:5], "--top-p", 0.9, "--json"))
    assert alone["tokens"] == several[0]["tokens"]
    greedy = [command(*asked[:5], "--seed", seed) for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    (begun,) = rows_of(command("text-demo", "--max-new-tokens", 5, "--json"))
    assert begun["prompt"] == ""


def test_a_stop_text_ends_a_language_model(command: Command) -> None:
    asked = ("text-demo", "--prompt", "Alice", "--max-new-tokens", 60, "--temperature", 1.5)
    (row,) = rows_of(command(*asked, "--json"))
    text = str(row["continuation"])
    stop = text[20:23]
    (stopped,) = rows_of(command(*asked, "--stop", "nowhere", stop, "--json"))
    assert stopped["continuation"] == text[: text.index(stop)]
    assert len(stopped["tokens"]) < len(row["tokens"])  # type: ignore[arg-type]


def test_text_comes_as_it_is_said(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("tra.cli.generate.sys.stdout.flush", lambda: None)
    monkeypatch.setattr("tra.cli.generate.sys.stdout.write", pieces.append)
    assert command("text-demo", "--prompt", "Alice\x1b[2J", "--max-new-tokens", 9)[0] == 0
    assert pieces[0] == "Alice�[2J"  # what could do something to a terminal doesn't
    assert len(pieces) >= 9


def test_characters_that_span_tokens_come_whole() -> None:
    text, stream = "né 漢字 😀!", TextStream()
    pieces = [stream.add(bytes([byte])) for byte in text.encode()]
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.finish() == ""
    assert stream.add("字".encode()[:2]) + stream.finish() == ""  # half a character at the end is left out
    assert stream.text == text
    assert TextStream().add(b"a\xffb") == "a�b"  # no text at all: bytes that can't become any


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_text_is_never_shown(size: int) -> None:
    for text, stops, expected in (
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one\ntwo", ["\n\n"], "one\ntwo"),
        ("ababac", ["abac"], "ab"),
        ("the end.", ["end.", "the"], ""),
        ("héé漢", ["é漢"], "hé"),
        ("ends in a", ["ab"], "ends in a"),
    ):
        stream, shown, data = TextStream(stops), "", text.encode()
        for start in range(0, len(data), size):
            shown += stream.add(data[start : start + size])
            assert expected.startswith(shown)
            if stream.ended:
                break
        shown += stream.finish()
        assert shown == stream.text == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none doesn't exist; runs that ship with the package: flipflop-tra"),
        (["."], "is not a run folder"),
        (["unfinished"], "unfinished has no model.safetensors yet: the run hasn't ended"),
        (["truncated"], "model.safetensors can't be read"),
        (["flipflop-tra", "--prompt", ""], "the prompt is empty: it has at least one character"),
        (["flipflop-tra", "--prompt", " "], "the prompt is empty: it has at least one symbol"),
        (["flipflop-tra", "--prompt", "-"], "the prompt is empty"),
        (["text-demo", "--prompt", ""], "the prompt is empty"),
        (["text-demo", "--prompt", "\udcff"], "the prompt is not UTF-8 text"),
        (["flipflop-tra", "--prompt", "w1x"], "unknown symbol of flipflop 'x': known are w, r, i, 0, 1"),
        (["flipflop-tra", "--prompt", "w1r0i"], "the read at symbol 2 gives 0, but the other bit was written"),
        (["flipflop-tra", "--prompt", "i1r"], "a flip-flop sequence starts with w, got 'i'"),
        (["flipflop-tra", "--prompt", "w10"], "expected w, r or i at symbol 2, got '0'"),
        (["flipflop-tra", "--prompt", "w1ii"], "expected w, r or i and a bit at symbol 2, got 'ii'"),
        (["copy", "--prompt", "<bos> c <sap>"], "unknown symbol of copy '<sap>': did you mean '<sep>'?"),
        (["copy", "--prompt", "<bos>", "--stop", "<end>"], "unknown symbol of copy '<end>'"),
        (["copy", "--prompt", "<bos> cab <sep>"], "'cab' is no symbol of copy: write 'c a b', with spaces"),
        (["copy", "--prompt", "<bos>c"], "did you mean '<bos>'?; symbols have spaces between them"),
        (["text-demo", "--stop", ""], "a --stop text has at least one character"),
        (["flipflop-tra", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["flipflop-tra", "--number", "0"], "--number must be at least 1, got 0"),
        (["text-demo", "--temperature", "-1"], "temperature must be finite and at least 0, got -1.0"),
        (["text-demo", "--top-k", "0"], "top_k must be at least 1, got 0"),
        (["text-demo", "--top-p", "1.5"], "top_p must lie in (0, 1], got 1.5"),
        (["text-demo", "--temperature", "0", "--top-k", "3"], "at --temperature 0 nothing is drawn"),
        (["text-demo", "--temperature", "0", "--number", "3"], "at --temperature 0 every continuation is the same"),
    ],
)
def test_bad_commands(command: Command, arguments: list[str], message: str) -> None:
    status, said = command(*arguments)
    assert status == 2
    assert message in said
    assert len(said.strip().splitlines()) == 1


def test_generating_changes_no_run(command: Command) -> None:
    before = {path: path.stat().st_mtime_ns for path in (SHIPPED / "flipflop-tra").iterdir()}
    assert command("flipflop-tra", "--prompt", "w1r")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in (SHIPPED / "flipflop-tra").iterdir()} == before
