"""EleutherAI's harness on an exported model, offline, held against this package's own scores."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tests.hub.test_export import make_run
from tests.text.data import SMALL_WIKITEXT
from tra.evaluation.perplexity import token_losses
from tra.hub import lm_eval as tasks
from tra.hub.export import export_run
from tra.hub.lm_eval.local_text import documents, process_results, read_documents
from tra.model import Decoder
from tra.text import load_tokenizer, shipped_text
from tra.text.prepare import prepare
from tra.text.store import TokenStore
from tra.text.task import Stream

FOLDER = Path(tasks.__path__[0])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Four articles in WikiText's form, the last one much longer than a window."""
    alice = shipped_text().read_text()[2000:4500].replace("\n\n", "\n")
    file = tmp_path / "wiki.test.raw"
    file.write_text(SMALL_WIKITEXT.read_text() + f" \n = Alice = \n \n {alice}\n")
    return file


def test_documents_are_those_of_a_store(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare([text], tmp_path / "store", tokenizer=load_tokenizer("bytes"))
    store = TokenStore.open(tmp_path / "store")
    found = read_documents(str(text))
    assert len(found) == len(store.documents) == 4
    for document, (_, size, words) in zip(found, store.documents, strict=True):
        scored = process_results({"text": document}, [-1.0])
        assert (scored["byte_perplexity"][1], scored["word_perplexity"][1]) == (size, words)
    assert read_documents(str(text.parent)) == found
    monkeypatch.setenv("TRA_TEXT", str(text))
    assert documents()["test"]["text"] == documents(path=str(text), pretrained="x")["test"]["text"] == found


def test_a_text_that_is_not_named_or_there_gets_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRA_TEXT", raising=False)
    with pytest.raises(ValueError, match="name the text: in the environment variable TRA_TEXT"):
        documents()
    with pytest.raises(ValueError, match="there is no file or folder"):
        documents(path=str(tmp_path / "none.txt"))
    (tmp_path / "ids.bin").write_bytes(b"\1\0")
    with pytest.raises(ValueError, match="is a token stream; the harness needs text"):
        documents(path=str(tmp_path / "ids.bin"))


@torch.no_grad()
def rolling_losses(model: Decoder, separator: int, ids: list[int], window: int, known: int | None = None) -> Tensor:
    """Nats `[N]`, as the harness rolls: windows one after another, and a last one that reaches back to be whole too.

    With `known`, only the first so many ids can be said, as in an exported folder.
    """
    stream, found, scored = [separator, *ids], [], 0
    while scored < len(ids):
        end = min(scored + window, len(ids))
        start = 0 if scored == 0 else end - window
        log_probabilities = model(torch.tensor(stream[start:end])[None])[0, :, :known].log_softmax(-1)
        found.append(-log_probabilities[range(scored - start, end - start), stream[scored + 1 : end + 1]])
        scored = end
    return torch.cat(found).double()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "margin"), [("bytes", "inf"), ("gpt2", "0")])
def test_the_harness_agrees(name: str, margin: str, text: Path, tmp_path: Path) -> None:
    changes = (f"task.arguments.tokenizer={name}", "model.d_model=8", f"model.margin={margin}")
    run = make_run(tmp_path / "run", "text-demo", *changes)
    export_run(run, tmp_path / "model")
    window = 100
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "4"]
    command += ["--model_args", f"pretrained={tmp_path / 'model'},trust_remote_code=True,max_length={window}"]
    command += ["--include_path", str(FOLDER), "--tasks", "tra_text", "--output_path", str(tmp_path / "results.json")]
    environment = os.environ | {"TRA_TEXT": str(text), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.glob("results*.json")
    found = json.loads(file.read_text())["results"]["tra_text"]

    tokenizer, articles = load_tokenizer(name), read_documents(str(text))
    known = json.loads((tmp_path / "model/config.json").read_text())["vocab_size"]
    exported = AutoTokenizer.from_pretrained(tmp_path / "model")  # to which <|endoftext|> in a text is special
    plain, exact = (
        torch.cat([rolling_losses(model, tokenizer.separator, exported.encode(a), window, known) for a in articles])
        for model in (run.load_model(), run.load_model().double())
    )
    nats, allowed = float(exact.sum()), 2 * float((plain - exact).abs().sum())
    words, size = sum(len(a.split()) for a in articles), sum(len(a.encode()) for a in articles)
    assert abs(math.log(found["word_perplexity,none"]) * words - nats) <= allowed
    assert abs(math.log(found["byte_perplexity,none"]) * size - nats) <= allowed
    assert abs(found["bits_per_byte,none"] * math.log(2) * size - nats) <= allowed
    assert allowed < 1e-4 * nats  # so that it says something

    # The same by `tra evaluate`, where all of a document fits into one window.
    stream = Stream.of_text("short", articles[0], tokenizer)
    whole = len(stream.tokens)
    ours = token_losses(run.load_model(), stream, whole, "none", batch_tokens=whole, device=torch.device("cpu"))
    plain, exact = (
        rolling_losses(model, tokenizer.separator, tokenizer.encode(articles[0]), whole)
        for model in (run.load_model(), run.load_model().double())
    )
    assert float((torch.from_numpy(ours[1:]) - exact).norm()) <= 2 * float((plain - exact).norm())
