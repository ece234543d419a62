"""What README and the pages of docs/ say is so."""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tra
from benchmarks.tables import TABLE, TABLES, filled, pages
from tra.attention import MECHANISMS
from tra.cli.main import VERBS
from tra.hub.export import export_run
from tra.presets import PRESETS
from tra.runs import RunFolder, read_rows
from tra.suite import SUITES
from tra.tasks import TASKS

ROOT = Path(__file__).parents[1]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in pages()}
README = TEXTS["README.md"]
API = "\n".join(text for page, text in TEXTS.items() if page.startswith("docs/api"))
SLOW = ("docs/first-model.md",)
"""Pages whose code trains a model."""
OWN_TESTS = {
    "docs/bounded-memory.md": "test_bounded_memory_guide.py",
    "docs/context-parallel.md": "test_context_parallel_guide.py",
}
"""Pages whose code needs names that are not in it, and the tests that run it."""


def in_one_line(page: str) -> str:
    """Return a page's text without its line ends."""
    return " ".join(TEXTS[page].split())


def bench(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "results/bench" / name).read_text())["rows"]
    return rows


@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(page, code, marks=pytest.mark.slow if page in SLOW else (), id=f"{page}-{number}")
        for page, text in TEXTS.items()
        if page not in OWN_TESTS
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    ],
)
def test_code_runs(page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "my-model" in code:  # as the line above it has it
        assert "tra export flipflop-tra my-model" in TEXTS[page]
        export_run(RunFolder.open("flipflop-tra"), "my-model")
    exec(code, {"__name__": "__main__"})


def test_other_code_has_tests_of_its_own() -> None:
    for page, test in OWN_TESTS.items():
        assert Path(page).name in (Path(__file__).parent / test).read_text()


def test_the_tree_is_the_tree() -> None:
    """Every entry at the top of the package stands in it, and nothing else does."""
    tree = README.split("## Where things are")[1].split("## Sources")[0]
    named = re.findall(r"^      ([a-z_]+/|[a-z_]+\.py) ", tree, re.M)
    entries = {path.name + ("/" if path.is_dir() else "") for path in (ROOT / "tra").iterdir()}
    assert sorted(named) == sorted(entries - {"__init__.py", "__main__.py", "__pycache__/", "py.typed"})
    assert len(named) <= 16


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if TABLE.search(text)])
def test_tables_are_those_of_the_runs(page: str) -> None:
    assert filled(TEXTS[page]) == TEXTS[page], "python -m benchmarks.tables writes them"
    assert TEXTS[page].count("<!-- table:") == len(TABLE.findall(TEXTS[page]))


def test_every_table_is_shown() -> None:
    shown = {name for text in TEXTS.values() for _, name, _ in TABLE.findall(text)}
    assert shown == set(TABLES)


def test_a_table_of_another_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown table 'lenght'"):
        filled("<!-- table: lenght -->\n<!-- end of table -->")


def test_the_demo() -> None:
    rope = {row["split"]: row["exact"] for row in read_rows(ROOT / "results/demo/rope/eval.jsonl")}
    for page in ("README.md", "docs/first-run.md"):
        assert re.search(
            rf"{rope['dense']:.3f} to 0\.956 on dense and {rope['4x']:.3f} to 0\.252 at 4", in_one_line(page)
        )
    assert rope["16x"] == 0
    assert "0.000 at 16 times the length" in in_one_line("docs/first-run.md")


def test_which_rates_train_the_demos_task() -> None:
    """The table, the README and the page on the margin say what the logs in the archive say."""
    learnt: Counter[tuple[str, str]] = Counter()
    runs: Counter[tuple[str, str]] = Counter()
    with tarfile.open(ROOT / "results/trainability/runs.tar.gz") as archive:

        def read(name: str) -> str:
            member = archive.extractfile(name)
            assert member is not None
            return member.read().decode()

        for name in archive.getnames():
            if not name.endswith("/eval.jsonl"):
                continue
            config = json.loads(read(name.replace("eval.jsonl", "config.json")))
            margin = config["model"].get("margin", 0)
            variant = config["model"]["mechanism"] + (f", margin {margin:g}" if margin else "")
            exact = {row["split"]: row["exact"] for row in map(json.loads, read(name).splitlines())}["iid"]
            for rate in (f"{config['optim']['lr']:g}", "all"):
                runs[variant, rate] += 1
                learnt[variant, rate] += exact >= 0.99
    page = (ROOT / "results/trainability/README.md").read_text()
    for variant in ("tra", "tra, margin 2", "rope", "forgetting"):
        cells = [
            f"{learnt[variant, rate]} of {runs[variant, rate]}" for rate in ("0.0003", "0.001", "0.003", "0.01", "all")
        ]
        assert f"| {variant} | {' | '.join(cells)} |" in page
    assert f"first {sum(runs[key] for key in runs if key[1] == 'all')} of the suite's 160 runs" in page
    with_margin, without = (
        f"{learnt[variant, 'all']} of {runs[variant, 'all']}" for variant in ("tra, margin 2", "tra")
    )
    assert f"{with_margin} runs with a margin of 2 learnt it, and {without} without" in in_one_line("README.md")
    assert f"{with_margin} runs, and {without} without" in in_one_line("docs/what-we-changed.md")


def test_flip_flop_at_the_papers_size() -> None:
    tra, rope = (
        {row["split"]: row for row in read_rows(ROOT / "results/flipflop" / name / "eval.jsonl")}
        for name in ("tra", "rope")
    )
    assert {row["exact"] for row in tra.values()} == {1.0}
    counts = [f"{tra[split]['examples']:,}" for split in ("sparse", "dense", "64x")]
    assert (
        f"no error in {counts[0]} sparse sequences, in {counts[1]} dense ones, nor in {counts[2]} of "
        f"{tra['64x']['longest']:,} symbols"
    ) in in_one_line("docs/tasks.md")
    failing = f"RoPE fails on {100 * (1 - rope['sparse']['exact']):.0f} % of"
    assert f"{failing} {counts[0]} sequences and TRA on none" in in_one_line("README.md")
    assert f"{failing} the sparse ones and on every sequence of {rope['16x']['longest']:,} symbols" in in_one_line(
        "docs/tasks.md"
    )
    assert rope["16x"]["exact"] == 0


def test_the_operators_speed() -> None:
    rows, page = bench("op-h200.json"), in_one_line("docs/results/speed.md")

    def find(contender: str, mode: str, length: int) -> dict[str, Any]:
        wanted = {"contender": contender, "mode": mode, "length": length, "gates": "init", "content": "dense"}
        (row,) = [row for row in rows if row["width"] == 64 and wanted.items() <= row.items()]
        return row

    ours, plain = (find(name, "forward and backward", 4096) for name in ("tra", "plain, compiled"))
    assert f"{plain['ms'] / ours['ms']:.0f} times as fast with backward" in page
    assert f"in a {plain['peak_mib'] / ours['peak_mib']:.0f}th of the memory" in page
    assert f"({find('tra, full walk', 'forward', 256)['times_flash']:.2f}× forward at 256" in page
    million = find("tra", "forward and backward", 2**20)
    assert f"{million['ms'] / 1000:.2f} s, {million['peak_mib'] / 1024:.0f} GiB" in page
    assert million["finite"]
    cpu = json.loads((ROOT / "results/bench/op-cpu.json").read_text())
    assert f"{cpu['speedup']:.1f} times as fast" in page
    assert f"it took {cpu['memory_ratio']:.2f} of the memory" in page


def test_the_speed_of_decoding() -> None:
    speeds = [
        row["tokens_per_second"]
        for batch in (1, 32)
        for name in ("tra", "rope")
        for row in bench(f"generate-{name}.json")
        if row["graph"] and row["prompt"] == 4096 and row["batch"] == batch
    ]
    one, rival, many, rivals = (f"{speed:,.0f}" for speed in speeds)
    assert (
        f"{one} tokens per second with TRA and {rival} with RoPE, in a batch of 32 {many} and {rivals}"
    ) in in_one_line("docs/results/speed.md")


def test_training_steps() -> None:
    rows = bench("step-tra.json")
    mini, medium, large = (
        {row["mechanism"]: f"{row['step_ms']:.2f}" for row in rows if (row["size"], row["vocabulary"]) == which}
        for which in (("mini", 256), ("medium", 256), ("medium", 50304))
    )
    page = in_one_line("docs/results/speed.md")
    assert f"{mini['tra']} ms with TRA and {mini['rope']} ms with RoPE" in page
    assert f"at 64 × 256 {medium['tra']} ms and {medium['rope']} ms, with GPT-2's vocabulary {large['tra']} ms" in page
    assert f"and {large['rope']} ms" in page
    assert f"{medium['tra']} ms with TRA and {medium['rope']} ms with RoPE" in in_one_line("README.md")
    tra, rope = (row for row in rows if row["vocabulary"] == 50304)
    assert (
        f"{tra['step_ms']:.1f} ms and {tra['peak_mib'] / 1024:.1f} GiB, with RoPE {rope['step_ms']:.1f} ms"
    ) in in_one_line("docs/train-on-your-data.md")


def test_what_training_on_text_costs() -> None:
    page = in_one_line("docs/train-on-your-data.md")
    cost = {(row["size"], row["mechanism"]): row["step_ms"] for row in bench("cost.json")}
    medium, tiny = (cost[size, "tra"] / cost[size, "rope"] for size in ("medium", "tiny"))
    assert f"TRA takes {medium:.2f} times RoPE's step (paper: 1.14), the tiny model {tiny:.2f} times" in page
    prepared = bench("prepare.json")[-1]
    assert f"100 MB of English take {prepared['seconds']:.0f} s and {prepared['peak_mib']} MiB" in page


@pytest.mark.parametrize("page", ["docs/add-a-suite.md", "docs/results/speed.md"])
def test_cells_in_an_hour(page: str) -> None:
    one, two, four = bench("cells.json")
    assert f"did {one['cells_per_hour']:.0f} mini cells" in in_one_line(page)
    assert f"{two['cells_per_hour']:.0f} with `--jobs 2` and {four['cells_per_hour']:.0f} with `--jobs 4`" in (
        in_one_line(page)
    )


def test_names_exist() -> None:
    everything = "\n".join(TEXTS.values())
    for verb, preset in re.findall(r"tra (\w+) --preset ([\w-]+)", everything):
        assert verb in VERBS
        assert preset in PRESETS
    for name in PRESETS:
        assert f"`{name}`" in TEXTS["docs/command.md"] or f"`{name.removesuffix('-quick')}`" in TEXTS["docs/command.md"]
    for name in MECHANISMS:
        assert f"| `{name}` |" in TEXTS["docs/mechanisms.md"]
    for name in TASKS:
        assert f"| `{name}` |" in TEXTS["docs/tasks.md"]
    for name in SUITES:
        assert f"`{name}`" in TEXTS["docs/add-a-suite.md"]
    targets = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|    )make ([a-z-]+)", everything):
        assert f"\n{target}:" in targets, target


def test_what_guides_import_is_on_the_api_pages() -> None:
    """Names that are not there may change without notice."""
    code = "\n".join("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) for text in TEXTS.values())
    imported = re.findall(r"^from tra(?:\.[\w.]+)? import ([\w, ]+)$", code, re.MULTILINE)
    names = {name for line in imported for name in line.split(", ")} | set(tra.__all__) - {"__version__"}
    described = set(re.findall(r"^\.\. auto\w+:: [\w.]*?(\w+)$", API, re.MULTILINE))
    known = described | {"NoPositionAttention"}
    assert names <= known, names - known


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 170


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)
    for link in re.findall(r"\]\((?!http|#)([^)#]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / link).exists(), link
