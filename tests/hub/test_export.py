"""`tra export`: runs become folders that transformers loads, whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import tra.hub.export as exporting
from tests.text.data import SMALL_WIKITEXT
from tra.attention import MECHANISMS
from tra.cli.main import parse
from tra.hub.export import export_run
from tra.model import Decoder
from tra.presets import preset
from tra.runs import RunFolder, environment, write_rows
from tra.tasks import TASKS, generator
from tra.text import load_tokenizer

SMALL = ("model.d_model=16", "model.n_layers=1", "model.n_heads=2")
TEXT = SMALL_WIKITEXT.read_text()


def make_run(folder: Path, name: str, *changes: str) -> RunFolder:
    """A run that ended, of a model that learnt nothing."""
    config = preset(name).override([*SMALL, *changes])
    run = RunFolder(folder)
    run.start(config, resume=False, overwrite=False)
    run.note_environment(torch.device("cpu"))
    torch.manual_seed(0)
    run.save_weights(Decoder(config.model), config.train.steps)
    return run


def make_text_export(folder: Path) -> Path:
    """Export a run of a language model of bytes that learnt nothing; return the folder of the export."""
    run = make_run(folder / "run", "text-demo", "task.arguments.tokenizer=bytes", "model.d_model=16")
    export_run(run, folder / "model")
    return folder / "model"


def export(*arguments: str | Path) -> int:
    return parse(["export", *map(str, arguments)])()


@pytest.mark.parametrize("mechanism", list(MECHANISMS))
def test_logits_are_the_run_s_to_the_bit(mechanism: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "demo", f"model.mechanism={mechanism}")
    assert export(run.path, tmp_path / "out") == 0
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.randint(5, (2, 64))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, run.load_model()(ids))
    text = model.generate(ids[:, :9], max_new_tokens=6, do_sample=False)
    assert torch.equal(text[:, 9:], run.load_model().generate(ids[:, :9], 6))


@pytest.mark.parametrize(
    ("margin", "name"), [("2", "TRA, threshold −1, margin 2"), ("inf", "TRA, threshold −1, margin ∞")]
)
def test_threshold_and_margin_are_exported(margin: str, name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "demo", f"model.margin={margin}", "model.threshold=-1")
    assert export(run.path, tmp_path / "out") == 0
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.randint(5, (2, 64))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, run.load_model()(ids))
        plain = make_run(tmp_path / "plain", "demo").load_model()
        assert not torch.allclose(model(ids).logits, plain(ids), rtol=1e-3)
    for implementation in ("dynamic", "static"):
        text = model.generate(ids[:, :9], max_new_tokens=6, do_sample=False, cache_implementation=implementation)
        assert torch.equal(text[:, 9:], run.load_model().generate(ids[:, :9], 6))
    assert f"A decoder with {name}: 1 layers" in (tmp_path / "out" / "README.md").read_text()


def test_the_shipped_run_still_knows_its_task(tmp_path: Path) -> None:
    assert export("flipflop-tra", tmp_path / "out") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for prompt, answer in (("w1i0i0i0r", "1"), ("w1i1w0i1i1r", "0")):
        inputs = tokenizer(prompt, return_tensors="pt")
        said = tokenizer.decode(model.generate(**inputs, max_new_tokens=1, do_sample=False)[0])
        assert said == prompt + answer


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_text_runs_have_their_tokenizer(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "text-demo", f"task.arguments.tokenizer={name}", "model.d_model=4")
    export_run(run, tmp_path / "out")
    tokenizer, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(name)
    for text in (TEXT, "", " ", "don't  stop\n\n— 漢字 🙂 ½", "<|endoftext|>"):
        ids = tokenizer(text, split_special_tokens=True).input_ids
        assert ids == ours.encode(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == ours.separator
    assert tokenizer.pad_token_id == ours.vocab_size
    assert tokenizer.padding_side == "left"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.eos_token_id == ours.separator
    assert model.config.vocab_size == len(tokenizer)
    inputs = tokenizer(["Alice was", "A"], return_tensors="pt", padding=True)
    with torch.no_grad():  # what is cut off is only the ids that the tokenizer doesn't have
        logits = run.load_model()(inputs.input_ids, key_mask=inputs.attention_mask.bool())
        assert torch.equal(model(**inputs).logits, logits[..., : len(tokenizer)])


@pytest.mark.parametrize("name", list(TASKS))
def test_tasks_have_a_tokenizer_of_their_symbols(name: str, tmp_path: Path) -> None:
    task = TASKS[name]()
    export_run(make_run(tmp_path / "run", name), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == task.vocab_size
    for row in task.sample("train", 4, generator(0, "test")).tokens:
        text = task.render(row)
        assert tokenizer(text).input_ids == row.tolist()
        assert tokenizer.decode(row) == text
    for part, symbol in (("pad", "<pad>"), ("bos", "<bos>"), ("eos", "<eos>")):
        expected = task.vocabulary.index(symbol) if symbol in task.vocabulary else None
        assert getattr(tokenizer, f"{part}_token_id") == expected
        assert getattr(AutoModelForCausalLM.from_pretrained(tmp_path / "out").config, f"{part}_token_id") == expected


def test_the_card_tells_what_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "demo", "train.seed=7")
    steps = preset("demo").train.steps
    row = {"split": "16x", "shortest": 1024, "longest": 1024, "examples": 500, "exact": 0.25, "low": 0.2, "high": 0.3}
    write_rows(run.evaluation_file, [row])
    export_run(run, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for part in (
        "A decoder with TRA: 1 layers, 2 heads, width 16",
        f"the task flipflop (length 64): {steps:,} steps of 64 sequences, seed 7",
        "| 16x | 1024 | 500 | 0.250 (0.200-0.300) |",
        'from_pretrained("model")',
        str(environment(torch.device("cpu"))["commit"]),
        f"transformers {transformers.__version__}",
    ):
        assert part in card, part
    text = make_run(tmp_path / "text", "text-demo", "task.arguments.window=32")
    perplexity = {"text": "alice-valid", "window": 32, "overlap": "none", "perplexity": 12.345}
    write_rows(text.perplexity_file, [perplexity | {"word_perplexity": None, "bits_per_byte": 1.5}])
    export_run(text, tmp_path / "language")
    card = (tmp_path / "language" / "README.md").read_text()
    assert "Alice's Adventures in Wonderland in windows of 32 tokens (bytes)" in card
    assert "| alice-valid | 32 | none | 12.35 |  | 1.5000 |" in card


def test_the_card_s_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export_run(RunFolder.open("flipflop-tra"), tmp_path / "model")
    code = (tmp_path / "model" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.startswith("w")


def bad(tmp_path: Path) -> dict[str, tuple[tuple[str, ...], str]]:
    """Arguments by what is wrong with them, and what is said."""
    make_run(tmp_path / "good", "demo")
    for name in ("unfinished", "cut", "tampered", "newer", "other"):
        shutil.copytree(tmp_path / "good", tmp_path / name)
    (tmp_path / "unfinished" / "model.safetensors").unlink()
    for name in ("cut", "tampered"):
        file = tmp_path / name / "model.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-10] if name == "cut" else whole[:-1] + bytes([whole[-1] ^ 1]))

    def change(name: str, **sections: dict[str, Any] | int) -> None:
        file = tmp_path / name / "config.json"
        values = json.loads(file.read_text())
        for key, value in sections.items():
            values[key] = values[key] | value if isinstance(value, dict) else value
        file.write_text(json.dumps(values))

    change("newer", version=99)
    change("other", model={"d_model": 32})
    make_run(tmp_path / "tokenizer", "text-demo")
    change("tokenizer", task={"arguments": {"tokenizer": "gpt3"}})
    make_run(tmp_path / "gpt2", "text-demo", "task.arguments.tokenizer=gpt2", "model.d_model=4")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").touch()
    return {
        "unknown run": (("nowhere", "out"), "nowhere doesn't exist; runs that ship"),
        "not a run": (("taken", "out"), "taken is not a run folder"),
        "no weights": (("unfinished", "out"), "unfinished has no model.safetensors yet: the run hasn't ended"),
        "cut": (("cut", "out"), "model.safetensors can't be read"),
        "tampered": (("tampered", "out"), "is damaged: its contents don't match its digest"),
        "newer config": (("newer", "out"), "version 99, this tra reads up to 1"),
        "other config": (("other", "out"), "doesn't fit other/config.json"),
        "unknown tokenizer": (("tokenizer", "out"), "unknown tokenizer 'gpt3'"),
        "no tokenizer": (("gpt2", "out", "--tokenizer-files", "taken"), "taken holds no GPT-2 tokenizer"),
        "taken": (("good", "taken"), "taken is not an exported model, so it is not overwritten"),
        "not ours": (("good", "taken", "--overwrite"), "taken is not an exported model, so it is not overwritten"),
        "the run itself": (("good", "good", "--overwrite"), "good is not an exported model"),
        "no folder": (("good",), "Missing from tra export"),
    }


def test_bad_input_gets_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cases = bad(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for arguments, message in cases.values():
        with pytest.raises(ValueError, match=re.escape(message)) as found:
            export(*arguments)
        assert "\n" not in str(found.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    command = [sys.executable, "-m", "tra", "export", "nowhere", "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("tra: nowhere doesn't exist")
    assert len(done.stderr.splitlines()) == 1


def test_overwriting_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", "demo"), tmp_path / "out"
    export_run(run, out)
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(out, max_shard_size="5KB")
    with pytest.raises(ValueError, match="out exists already"):
        export_run(run, out)
    export_run(run, out, overwrite=True)
    assert len(list(out.glob("*.safetensors"))) == 1
    assert not (out / "model.safetensors.index.json").exists()
    (out / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"is not only an exported model \(notes.txt is in it\)"):
        export_run(run, out, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_files_are_readable_by_all_who_may(tmp_path: Path) -> None:
    export_run(make_run(tmp_path / "run", "demo"), tmp_path / "out")
    assert len({stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_export_leaves_nothing(
    error: type[BaseException] | BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = make_run(tmp_path / "run", "demo"), tmp_path / "out"

    def fail(*_arguments: object) -> str:
        raise error

    export_run(run, out)
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(exporting, "model_card", fail)
    for place in (out, tmp_path / "new"):
        with pytest.raises((KeyboardInterrupt, exporting.NoSpaceError)):
            export_run(run, place, overwrite=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole


KILLED = """
import sys, time
from pathlib import Path
import tra.hub.export as exporting
from tra.runs import RunFolder

def wait(*_):
    print("now", flush=True)
    time.sleep(60)

exporting.model_card = wait
exporting.export_run(RunFolder(Path(sys.argv[1])), sys.argv[2])
"""


@pytest.mark.slow
def test_a_killed_export_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", "demo"), tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", KILLED, run.path, out], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    with pytest.raises(ValueError, match="is being written by another process"):
        export_run(run, out)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    assert (tmp_path / ".out.exporting").exists()
    export_run(run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_without_transformers_one_clear_line(tmp_path: Path) -> None:
    code = f"""
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else found(name, *rest)
sys.argv = ["tra", "export", "flipflop-tra", {str(tmp_path / "out")!r}]
from tra.cli.main import main
assert "transformers" not in sys.modules
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().startswith(f"tra: tra export needs transformers: {sys.executable} -m pip install")
