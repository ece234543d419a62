"""`tra generate --memory`: text of any length in a cache of a fixed size, and what its guard says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import tra
from tests.cli.conftest import CallTra
from tra.cli.memory import GUARD_TOLERANCE, Memory, guard_line, is_guarded, new_cache
from tra.evaluation import calibrate, text_sequences
from tra.presets import preset
from tra.runs import RunFolder, write_windows
from tra.text.task import Text

Command = CallTra
PROMPT = "Alice was beginning to get very tired of sitting by her sister on the bank"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained runs on text: TRA, which has been calibrated, another TRA, RoPE, FoT."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, (name, changes) in enumerate(
        [
            ("tra", ["model.gate_bias=1"]),
            ("other", ["model.gate_bias=1"]),
            ("rope", ["model.mechanism=rope"]),
            ("forgetting", ["model.mechanism=forgetting"]),
        ]
    ):
        config = preset("text-demo").override(["model.d_model=32", *changes])
        run = RunFolder(folder / name)
        run.start(config, resume=False, overwrite=False)
        torch.manual_seed(seed)
        run.save_weights(tra.Decoder(config.model), 0)
    run = RunFolder(folder / "tra")
    found = calibrate(run, run.load_model(), text_sequences(Text().stream("valid"), 257, 128, 2), 0.01)
    for file in (run.windows_file, folder / "elsewhere.json", folder / "other/windows.json"):
        write_windows(file, found)
    return folder


@pytest.fixture
def command(call_tra: CallTra, monkeypatch: pytest.MonkeyPatch, runs: Path) -> Command:
    monkeypatch.chdir(runs)
    return partial(call_tra, "generate")


def test_a_window_in_tokens(command: Command, runs: Path) -> None:
    """The text is that of the Python call, and the guard's line comes beside it."""
    asked = ("tra", "--prompt", PROMPT, "--max-new-tokens", 40)
    status, said, beside = command(*asked, "--memory", 6)
    assert status == 0
    assert "memory: 6 tokens in each layer, " in beside
    assert "; older keys may have weighed more than 0.001 for " in beside
    status, row, _ = command(*asked, "--memory", 6, "--json")
    found = json.loads(row)
    assert said.startswith(PROMPT)

    model = RunFolder(runs / "tra").load_model()
    ids = torch.tensor([Text().stream("valid").separator, *PROMPT.encode()])[None]
    cache = tra.BoundedCache(2, 6, guard=GUARD_TOLERANCE)
    text = model.generate(ids, 40, vocabulary=257, stop_tokens=[256], cache=cache)
    assert found["tokens"] == text[0].tolist()
    guard = found["memory"]["guard"]
    assert guard == cache.unmet_windows()
    assert found["memory"]["windows"] == [6, 6]
    assert all(0 <= unmet <= layer["queries"] for layer in guard for unmet in layer["unmet"])
    assert sum(layer["queries"] for layer in guard) > 0


def test_calibrated_windows(command: Command) -> None:
    asked = ("tra", "--prompt", PROMPT, "--max-new-tokens", 5, "--json")
    whole, calibrated, elsewhere = (
        json.loads(command(*asked, *options)[1])
        for options in ((), ("--memory", "calibrated"), ("--memory", "elsewhere.json"))
    )
    assert calibrated["memory"]["tolerance"] == 0.01
    assert [len(heads) for heads in calibrated["memory"]["windows"]] == [2, 2]
    assert calibrated == elsewhere
    assert "memory" not in whole
    assert len(calibrated["tokens"]) == len(whole["tokens"])


def test_a_window_beyond_the_text_takes_no_memory(command: Command) -> None:
    """Neither one that no memory holds; the text is that of a cache that holds all."""
    asked = ("tra", "--prompt", PROMPT, "--max-new-tokens", 5, "--json")
    whole, wide = (json.loads(command(*asked, *options)[1]) for options in ((), ("--memory", 10**15)))
    assert wide["tokens"] == whole["tokens"]
    assert wide["memory"]["windows"] == [10**15] * 2
    assert wide["memory"]["bytes"] < 2**20


def test_rope_has_no_guard(command: Command) -> None:
    status, _, beside = command("rope", "--prompt", PROMPT, "--max-new-tokens", 5, "--memory", 16)
    assert status == 0
    assert beside.splitlines()[-1].startswith("memory: 16 tokens in each layer, ")
    assert beside.splitlines()[-1].endswith("MiB")


def test_the_guard_by_hand() -> None:
    memory = Memory((4, 9), 0.001)
    assert not is_guarded(new_cache(memory, tra.DecoderConfig.tiny(5, qk_norm=False), 99))  # nothing bounds its scores
    cache = new_cache(memory, tra.DecoderConfig.tiny(5), 99)
    assert (
        guard_line(memory, cache) == "memory: 4 to 9 tokens in each layer, 0.0 MiB; no text was longer than its window"
    )
    for layer, unmet in zip(cache.layers, ([1, 2], [0, 3]), strict=True):
        assert layer.guard is not None
        layer.guard.queries, layer.guard.unmet = torch.tensor(6), torch.tensor(unmet)
    assert guard_line(memory, cache).endswith("; older keys may have weighed more than 0.001 for 25.0% of queries")


def test_the_guard_by_head() -> None:
    memory = Memory(((4, 70), (4, 4)), 0.001)
    cache = new_cache(memory, tra.DecoderConfig.tiny(5), 99)
    line = guard_line(memory, cache)
    assert line == "memory: 4 to 70 tokens in each head, 0.0 MiB; no text was longer than its window"
    model = tra.Decoder(tra.DecoderConfig.tiny(5)).eval()
    model.generate(torch.randint(5, (1, 20)), 70, cache=cache)
    rows = cache.unmet_windows()
    assert [row["window"] for row in rows] == [[4, 70], [4, 4]]
    # of the 90 tokens the last isn't read; of the prompt of 20, the last query is counted
    assert [row["queries"] for row in rows] == [[70, 19], [70, 70]]
    share = sum(sum(row["unmet"]) for row in rows) / (70 + 19 + 70 + 70)
    assert guard_line(memory, cache).endswith(f"for {share:.1%} of queries")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tra", "--memory", "0"), "--memory takes at least 1 token, 'calibrated', or a .json file of tra calibrate"),
        (("tra", "--memory", "-5"), "--memory takes at least 1 token"),
        (("tra", "--memory", "all"), "got 'all'"),
        (("tra", "--memory", "9" * 30), "--memory takes at least 1 token"),
        (("tra", "--memory", "none.json"), "there is no none.json: tra calibrate tra measures windows"),
        (("other", "--memory", "calibrated"), "was measured on another model than other: its weights differ"),
        (("rope", "--memory", "calibrated"), "there is no rope/windows.json"),
        (("forgetting", "--memory", "8"), "forgetting can't use a bounded cache: it is for TRA and rope"),
    ],
)
def test_bad_input_is_one_line(command: Command, arguments: tuple[str, ...], message: str) -> None:
    status, _, said = command(*arguments)
    assert status == 2
    assert message in said
    assert len(said.splitlines()) == 1
