"""What the README says is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tra.attention import MECHANISMS
from tra.bench.decode import LAYOUTS
from tra.cli.main import VERBS
from tra.hub.export import export_run
from tra.presets import PRESETS
from tra.runs import RunFolder, read_rows
from tra.tasks import TASKS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEST_ARTICLES = ("wikitext-test", "none")
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", CODE)
def test_its_code_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "my-model" in code:  # as the line above it has it
        assert "tra export flipflop-tra my-model" in README
        export_run(RunFolder.open("flipflop-tra"), "my-model")
    exec(code, {})


def test_its_tree_is_the_tree() -> None:
    """Every entry at the top of the package stands in it, and nothing else does."""
    tree = README.split("## Where things are")[1].split("## Sources")[0]
    named = re.findall(r"^      ([a-z_]+/|[a-z_]+\.py) ", tree, re.M)
    entries = {path.name + ("/" if path.is_dir() else "") for path in (ROOT / "tra").iterdir()}
    assert sorted(named) == sorted(entries - {"__init__.py", "__main__.py", "__pycache__/", "py.typed"})
    assert len(named) <= 16


def test_its_numbers_are_those_of_the_logs() -> None:
    rows = {
        name: {row["split"]: row["exact"] for row in read_rows(ROOT / "results/demo" / name / "eval.jsonl")}
        for name in ("tra", "tra-margin-2", "rope", "forgetting")
    }
    demo = {"tra": "TRA", "tra-margin-2": "TRA, margin 2", "rope": "RoPE", "forgetting": "FoT"}
    for name, label in demo.items():
        cells = " | ".join(f"{rows[name][split]:.3f}" for split in ("iid", "sparse", "dense", "4x", "16x"))
        assert f"| {label} | {cells} |" in README
    bench = json.loads((ROOT / "results/bench/op-cpu.json").read_text())
    assert f"{bench['speedup']:.1f} times as fast" in README
    assert f"it took {bench['memory_ratio']:.2f} of the memory" in README


def test_its_speeds_are_those_of_the_log() -> None:
    rows = json.loads((ROOT / "results/bench/op-h200.json").read_text())["rows"]

    def find(contender: str, mode: str, length: int, gates: str = "init", content: str = "dense") -> dict[str, Any]:
        wanted = {"contender": contender, "mode": mode, "length": length, "gates": gates, "content": content}
        (row,) = [row for row in rows if row["width"] == 64 and wanted.items() <= row.items()]
        return row

    for label, contender, gates, content, lengths, digits in (
        ("gates at initialisation", "tra", "init", "dense", (16_384, 65_536), 1),
        ("δ = −0.05", "tra", "-0.05", "dense", (16_384, 65_536), 1),
        ("a trained model's heads (flip-flop, 4)", "tra", "init", "trained", (16_384,), 1),
        ("every key read (`tolerance=0.0`)", "tra, full walk", "init", "dense", (16_384, 65_536), 2),
        ("1 % of the keys kept", "tra", "init", "sparse", (16_384,), 2),
        ("one row in 64 keeps nothing", "tra", "init", "null rows", (16_384,), 2),
    ):
        cells = []
        for mode in ("forward", "forward and backward"):
            found = [find(contender, mode, length, gates, content)["times_flash"] for length in lengths]
            cells += [f" {times:.{digits}f}× " for times in found] + [" "] * (2 - len(found))
        assert f"| {label} |{'|'.join(cells)}|" in README
    language = {
        (row["mode"], row["length"]): f"{row['times_flash']:.1f}×"
        for row in json.loads((ROOT / "results/bench/op-language.json").read_text())["rows"]
        if row["contender"] == "tra"
    }
    cells = [language[mode, length] for mode in ("forward", "forward and backward") for length in (16_384, 65_536)]
    assert f"| a trained language model's heads | {' | '.join(cells)} |" in README
    ours, plain = (find(name, "forward and backward", 4096) for name in ("tra", "plain, compiled"))
    assert f"{plain['ms'] / ours['ms']:.0f} times as fast with backward" in README
    assert f"in a {plain['peak_mib'] / ours['peak_mib']:.0f}th of the memory" in README
    assert f"({find('tra, full walk', 'forward', 256)['times_flash']:.2f}× forward at 256" in README
    million = find("tra", "forward and backward", 2**20)
    assert f"{million['ms'] / 1000:.2f} s, {million['peak_mib'] / 1024:.0f} GiB" in README.replace("\n", " ")
    assert million["finite"]


def test_its_decoding_is_that_of_the_logs() -> None:
    rows = json.loads((ROOT / "results/bench/decode.json").read_text())["rows"]

    def cell(batch: int, gates: str, context: int) -> str:
        wanted = {"contender": "tra", "batch": batch, "heads": 8, "gates": gates, "context": context}
        (row,) = [row for row in rows if row["layout"] == LAYOUTS[0] and wanted.items() <= row.items()]
        return f"{row['ms'] * 1000:.1f}, {row['times_sdpa']:.1f}×"

    for gates, label, batch in (
        ("init", "gates at initialisation, batch 1", 1),
        ("init", "gates at initialisation, batch 32", 32),
        ("-0.001", "δ = −0.001, batch 1", 1),
    ):
        cells = " | ".join(cell(batch, gates, context) for context in (1024, 16_384, 65_536, 262_144))
        assert f"| {label} | {cells} |" in README
    layers = json.loads((ROOT / "results/bench/decode-language.json").read_text())["rows"]
    ranges = []
    for context in (16_384, 65_536):
        times = [row["times_sdpa"] for row in layers if row["contender"] == "tra" and row["context"] == context]
        ranges.append(f"{min(times):.1f} to {max(times):.1f}×")
    assert f"| a trained language model's layers, batch 1 | | {' | '.join(ranges)} | |" in README
    speeds = [
        row["tokens_per_second"]
        for batch in (1, 32)
        for name in ("tra", "rope")
        for row in json.loads((ROOT / f"results/bench/generate-{name}.json").read_text())["rows"]
        if row["graph"] and row["prompt"] == 4096 and row["batch"] == batch
    ]
    one, rival, many, rivals = (f"{speed:,.0f}" for speed in speeds)
    assert f"{one} tokens per second with TRA and {rival} with RoPE, in a batch of 32 {many} and {rivals}" in (
        README.replace("\n", " ")
    )


def test_its_training_steps_are_those_of_the_log() -> None:
    rows = json.loads((ROOT / "results/bench/step-tra.json").read_text())["rows"]
    mini, medium, large = (
        {row["mechanism"]: f"{row['step_ms']:.2f}" for row in rows if (row["size"], row["vocabulary"]) == which}
        for which in (("mini", 256), ("medium", 256), ("medium", 50304))
    )
    text = README.replace("\n", " ")
    assert f"{mini['tra']} ms with TRA and {mini['rope']} ms with RoPE" in text
    assert f"at 64 × 256 {medium['tra']} ms and {medium['rope']} ms, with GPT-2's vocabulary {large['tra']} ms" in text
    assert f"and {large['rope']} ms" in text


def test_its_tasks_are_those_of_the_logs() -> None:
    def line(label: str, run: str, splits: tuple[str, ...]) -> str:
        found = {row["split"]: row["exact"] for row in read_rows(ROOT / "results/lengths" / run / "eval.jsonl")}
        return f"| {label} | " + " | ".join(f"{found[split]:.3f}" for split in splits) + " |"

    lengths, longer = (
        ("iid", "51-100", "201-250", "8x", "16x", "64x"),
        ("iid", "51-100", "101-200", "201-300", "401-500"),
    )
    assert line("copy, TRA", "copy/tra", lengths) in README
    assert line("induct, TRA", "induct/tra", lengths) in README
    assert line("induct, RoPE", "induct/rope", lengths) in README
    assert line("TRA", "instruct/tra", longer) in README
    assert line("RoPE", "instruct/rope", longer) in README
    one, two, four = json.loads((ROOT / "results/bench/cells.json").read_text())["rows"]
    assert f"did {one['cells_per_hour']:.0f} mini cells" in README
    assert f"{two['cells_per_hour']:.0f} with `--jobs 2` and {four['cells_per_hour']:.0f} with `--jobs 4`" in README


def test_its_language_models_are_those_of_the_logs() -> None:
    for name, label in (("tra", "TRA"), ("forgetting", "FoT"), ("cope", "CoPE"), ("rope", "RoPE")):
        rows = read_rows(ROOT / "results/language" / name / "perplexity.jsonl")
        found = {row["window"]: row["perplexity"] for row in rows if (row["text"], row["overlap"]) == TEST_ARTICLES}
        assert f"| {label} | {found[128]:.1f} | {found[4096]:.1f} | {found[16384]:.1f} |" in README
    steps = json.loads((ROOT / "results/bench/step-tra.json").read_text())["rows"]
    tra, rope = (row for row in steps if row["vocabulary"] == 50304)
    assert f"{tra['step_ms']:.1f} ms and {tra['peak_mib'] / 1024:.1f} GiB, with RoPE {rope['step_ms']:.1f} ms" in README
    cost = {
        (row["size"], row["mechanism"]): row["step_ms"]
        for row in json.loads((ROOT / "results/bench/cost.json").read_text())["rows"]
    }
    medium, tiny = (cost[size, "tra"] / cost[size, "rope"] for size in ("medium", "tiny"))
    assert f"TRA takes {medium:.2f} times RoPE's step (paper: 1.14), the tiny model {tiny:.2f} times" in README.replace(
        "\n", " "
    )
    prepared = json.loads((ROOT / "results/bench/prepare.json").read_text())["rows"][-1]
    assert f"100 MB of English take {prepared['seconds']:.0f} s and {prepared['peak_mib']} MiB" in README


def test_its_names_exist() -> None:
    for verb, preset in re.findall(r"tra (\w+) --preset ([\w-]+)", README):
        assert verb in VERBS
        assert preset in PRESETS
    for name in PRESETS:
        assert name in README or name.removesuffix("-quick") in README
    for name in (*TASKS, *MECHANISMS):
        assert name in README
    for target in re.findall(r"(?:`|    )make ([a-z-]+)", README):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    for link in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / link).exists(), link
