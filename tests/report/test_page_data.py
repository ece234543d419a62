"""What the page says is what the runs hold, whole or damaged."""

from __future__ import annotations

import base64
import html.parser
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.pages import HOSTILE, make_maps, make_run, make_text_run, write_json
from tra.report.page import embedded, page_text, write_page
from tra.report.page.data import clean, page_data

RESULTS = Path(__file__).parents[2] / "results"
OUT = Path("report.html")


def section(*folders: Path) -> dict[str, Any]:
    data, problems = page_data(folders, OUT)
    assert not problems
    (only,) = data["sections"]
    return only


def said(part: dict[str, Any]) -> str:
    return " ".join(" ".join([paragraph["text"], *paragraph["items"]]) for paragraph in part["summary"])


def test_one_seed_has_its_interval(tmp_path: Path) -> None:
    found = section(make_run(tmp_path / "a", "tra"), make_run(tmp_path / "b", "rope", fades=0.4))
    assert [group["label"] for group in found["groups"]] == ["TRA", "RoPE"]
    (table,) = found["tables"]
    assert table["columns"] == ["seeds", "iid (64)", "sparse (64)", "4x (256)", "16x (1,024)"]
    assert table["rows"][1]["cells"][-1] == {"text": "0.200 (0.180-0.220)", "value": pytest.approx(0.2)}
    length = found["charts"][0]
    line, beside = (line for line in length["measures"][0]["lines"] if line["group"] == 1)
    assert (line["x"], line["y"], line["several"]) == ([64, 256, 1024], [1.0, 0.6, 0.2], False)
    assert (line["low"][-1], line["high"][-1]) == (0.18, 0.22)
    assert "16x, length 1,024\n0.200 (0.180-0.220)" in line["text"][-1]
    assert (beside["alone"], beside["x"]) == (True, [64])
    assert (length["trained"], length["x_log"]) == (64, True)


def test_several_seeds_have_a_range(tmp_path: Path) -> None:
    found = section(*(make_run(tmp_path / str(seed), "rope", seed, fades=0.4) for seed in range(3)))
    cells = found["tables"][0]["rows"][0]["cells"]
    assert cells[0]["value"] == 3
    assert cells[-1]["text"] == "0.199 (0.198-0.200)"
    line = found["charts"][0]["measures"][0]["lines"][0]
    assert line["several"]
    assert (line["low"][-1], line["high"][-1]) == (0.198, 0.2)
    assert "mean and range of 3 seeds" in line["text"][-1]
    training = found["charts"][-1]["measures"][0]["lines"][0]
    assert training["y"][0] == pytest.approx((1 * 1 / 2 * 1 / 3) ** (1 / 3), rel=1e-5)
    assert found["charts"][-1]["measures"][0]["title"] == "training loss, geometric mean"
    assert "geometric mean and range of 3 seeds" in training["text"][0]
    assert (training["low"][0], training["high"][0]) == (pytest.approx(1 / 3, rel=1e-5), 1)


def test_the_summary_says_who_holds_up(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", "tra"), make_run(tmp_path / "b", "rope", fades=0.4)]
    runs += [make_run(tmp_path / f"c{seed}", "cope", seed, fades=0.0195) for seed in (0, 50)]
    words = said(section(*runs))
    assert "On the longest test set, 16x (1,024, 16 times the training length)" in words
    assert "compared with iid (as trained, 64):" in words
    assert "On sparse (more noise), of the same length:" in words
    assert "Hold up, by every run's 95 % intervals on the two: TRA 1.000 (0.980-1.000)." in words
    assert "Falls: RoPE, from 1.000 (0.980-1.000) to 0.200 (0.180-0.220), first seen at 4x (256)." in words
    assert "with some seeds only: CoPE" in words
    assert "Mass on keys of negative content score, at 16x" in words


def test_what_was_not_learnt_is_not_judged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "tra")
    file = run / "eval.jsonl"
    file.write_text(file.read_text().replace('"exact": 1.0, "low": 0.98', '"exact": 0.3, "low": 0.28'))
    words = said(section(run))
    assert "Not learnt, with a run below 0.9 on iid: TRA 0.300" in words
    assert "Hold up" not in words


def test_perplexity_rises_and_stays(tmp_path: Path) -> None:
    found = section(make_text_run(tmp_path / "a", "tra", grows=0.0), make_text_run(tmp_path / "b", "rope", grows=0.5))
    words = said(found)
    assert "RoPE rises from 20.1 (18.1-22.1) at window 128 to 54.6 (49.1-60.1) at 512, 2.72 times" in words
    assert "TRA goes from" in words
    assert found["tables"][0]["columns"] == ["seeds", "128", "256", "512"]
    assert found["charts"][0]["measures"][0]["log"]


def test_perplexity_of_several_seeds_is_a_geometric_mean(tmp_path: Path) -> None:
    found = section(*(make_text_run(tmp_path / str(seed), "tra", grows=0.5, seed=seed) for seed in (0, 40)))
    cell = found["tables"][0]["rows"][0]["cells"][1]
    assert cell["value"] == pytest.approx(math.exp(3.2))
    assert cell["text"] == f"{math.exp(3.2):.1f} ({math.exp(3):.1f}-{math.exp(3.4):.1f})"
    assert "2.72 to 2.72 times, by seed" in said(found)


def test_settings_part_groups_and_tasks_part_sections(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, "tra") for name in "ab"]
    config = json.loads((runs[1] / "config.json").read_text())
    config["optim"]["lr"] = 0.01
    write_json(runs[1] / "config.json", config)
    found = section(*runs)
    assert [group["label"] for group in found["groups"]] == ["TRA, lr 0.001", "TRA, lr 0.01"]
    assert [group["variant"] for group in found["groups"]] == [0, 1]
    assert "One mechanism in two settings (TRA, lr 0.001; TRA, lr 0.01), one seed each, was trained" in said(found)
    assert "optim.lr (0.001, 0.01)" in said(found)
    data, _ = page_data([*runs, make_text_run(tmp_path / "c", "tra", grows=0)], OUT)
    assert [part["title"] for part in data["sections"]] == [
        "flipflop (length 64)",
        "text (data data/words, window 128)",
    ]


def test_damaged_runs_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good", "tra")
    broken, empty, bare, cut, twin, maps, list_ = (
        make_run(tmp_path / name, "rope") for name in ("broken", "empty", "bare", "cut", "twin", "maps", "list")
    )
    (broken / "config.json").write_text('{"task": ')
    (list_ / "config.json").write_text("[]")
    shutil.rmtree(empty)
    (bare / "eval.jsonl").unlink()
    text = (cut / "eval.jsonl").read_text()
    (cut / "eval.jsonl").write_text(text[: len(text) - 30])
    (cut / "environment.json").write_text("nothing")
    (cut / "metrics.jsonl").write_bytes(b'\xff\n{"step": 1, "loss": NaN}\n{"step": 2, "loss": "x"}\n[]\n')
    (maps / "attend.npz").write_bytes(b"no zip")
    write_json(maps / "config.json", json.loads((maps / "config.json").read_text()) | {"train": {"seed": 9}})
    data, problems = page_data(
        [good, broken, list_, empty, bare, cut, twin, maps, good, tmp_path / "cut" / "eval.jsonl"], OUT
    )
    assert len(data["sections"][0]["runs"]) == 3
    why = {f"{Path(problem.run).name}: {problem.why}" for problem in problems}
    for expected in (
        "broken: config.json is damaged",
        "list: config.json is damaged: no task.name",
        "empty: doesn't exist",
        "bare: has no results: run tra evaluate",
        "cut: 1 of 4 lines of eval.jsonl are damaged",
        "cut: 3 of 4 lines of metrics.jsonl are damaged",
        "cut: environment.json is damaged",
        "twin: has the same config and seed as",
        "maps: its attention maps are left out",
        "good: is named twice",
        "eval.jsonl: is not a folder",
    ):
        assert any(line.startswith(expected) for line in why), (expected, why)
    assert json.loads(embedded(data))["problems"] == data["problems"]


def test_maps_say_which_keys_stay_without_counting(tmp_path: Path) -> None:
    plain, margin = make_maps(make_run(tmp_path / "a", "tra")), make_run(tmp_path / "b", "tra", seed=1)
    make_maps(margin, size=100, has_margin=True)
    first, second = section(plain, margin)["maps"]
    assert first["uncounted"] == ""
    found = np.frombuffer(base64.b64decode(second["uncounted"]), "u1")
    assert found.sum() == 0  # the first key is not among the last 96
    make_maps(margin, has_margin=True)
    _, second = section(plain, margin)["maps"]
    cells = np.frombuffer(base64.b64decode(second["uncounted"]), "u1").reshape(2, 2, 12, 12)
    assert cells[0, 0].argmax(1).tolist() == [0] * 12
    assert cells[0, 0].sum(1).tolist() == [1, 1, 0, *[1] * 9]


def test_maps_are_cut_to_what_a_page_can_carry(tmp_path: Path) -> None:
    small, *large = (make_run(tmp_path / str(seed), "tra", seed) for seed in range(14))
    make_maps(small, size=10)
    for folder in large:
        make_maps(folder, layers=1, heads=1, size=100)
    data, _ = page_data([small, *large], OUT)
    maps = data["sections"][0]["maps"]
    assert len(maps) == 12
    assert "12 of 14 runs" in data["maps_note"]
    assert "last 96 queries" in data["maps_note"]
    first, second = maps[:2]
    weights = np.frombuffer(base64.b64decode(first["weights"]), np.uint8).reshape(2, 2, 10, 10)
    assert weights[0, 1, 3].tolist() == [5, 5, 5, 1 + round(63 * 0.5**0.5), 0, 0, 0, 0, 0, 0]
    assert np.frombuffer(base64.b64decode(first["content"]), "<f2")[0] == 1.5
    assert (second["rows"][0], second["columns"][0], second["columns"][-1]) == (4, 4, 99)
    cut = np.frombuffer(base64.b64decode(second["distances"]), "<u2").reshape(96, 96)
    assert cut[-1, 0] == 96


def test_hostile_text_stays_inside_its_element(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(number), text) for number, text in enumerate(HOSTILE)]
    data, _ = page_data(runs, OUT)
    text = page_text(data)

    class Counter(html.parser.HTMLParser):
        scripts, images = 0, 0

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.scripts += tag == "script"
            self.images += tag == "img"

    counter = Counter()
    counter.feed(text)
    assert (counter.scripts, counter.images) == (3, 0)
    block = text.split('id="data">')[1].split("</script>")[0]
    assert not set(block) & set("<>&\u2028\u2029")
    assert json.loads(block) == data
    assert {group["label"] for group in data["sections"][0]["groups"]} == set(HOSTILE)


def test_numbers_that_json_lacks_are_null() -> None:
    assert clean({"a": [float("nan"), float("inf"), 1.5], "b": "\ud800"}) == {"a": [None, None, 1.5], "b": "?"}


@pytest.mark.parametrize("folder", ["demo", "flipflop", "rivals", "language"])
def test_committed_runs_are_shown(folder: str, tmp_path: Path) -> None:
    runs = sorted(path.parent for path in (RESULTS / folder).glob("*/config.json"))
    assert write_page(runs, tmp_path / "new" / "page.html") == []
    assert 4e6 < (tmp_path / "new" / "page.html").stat().st_size < 15e6


@pytest.mark.slow
def test_the_command_goes_on_with_what_there_is(tmp_path: Path) -> None:
    make_run(tmp_path / "good", "tra")

    def report(*runs: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tra", "report", *runs, "--out", "page.html"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = report("good", "missing")
    assert (done.returncode, done.stdout) == (0, "page.html\n")
    assert "missing doesn't exist\n" in done.stderr
    done = report("missing", "also")
    assert done.returncode == 2
    assert done.stderr == "tra: no run can be shown: missing doesn't exist; also doesn't exist\n"


def test_the_page_needs_no_figures() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import tra.report.page"
    subprocess.run([sys.executable, "-c", code], check=True)
