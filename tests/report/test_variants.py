"""Runs that differ in threshold and margin are told apart, in order, wherever mechanisms are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.report.pages import make_maps, make_run, make_text_run, write_json, write_lines
from tests.report.test_figures import diagnosed, run
from tra.report.comparison import comparison_text
from tra.report.curve_figures import exact_curves
from tra.report.exact_match import draw_exact_match
from tra.report.figures import write_figures
from tra.report.heads import kept_curves
from tra.report.language import language_text
from tra.report.names import COLOURS, NAMES, colours_of, name_of, table_order
from tra.report.page.data import page_data
from tra.report.runs import EvaluatedRun, by_variant, read_run, read_runs
from tra.report.style import bar_styles, line_styles, split_into_panels
from tra.report.summary import write_summary

VARIANTS = ["tra, threshold -1", "tra", "tra, margin 0.5", "tra, margin 2", "tra, margin 10", "tra, margin inf"]
MARGINS: list[Any] = [None, 0.0, 2.0, 10.0, "inf"]


def with_settings(folder: Path, **settings: Any) -> Path:
    """Change the section `model` of a run's config."""
    config = json.loads((folder / "config.json").read_text())
    config["model"] |= settings
    write_json(folder / "config.json", config)
    return folder


def with_margin(found: EvaluatedRun, margin: Any) -> EvaluatedRun:
    found.config["model"]["margin"] = margin
    return found


def test_names() -> None:
    assert [name_of(variant) for variant in VARIANTS] == [
        "TRA, threshold −1",
        "TRA",
        "TRA, margin 0.5",
        "TRA, margin 2",
        "TRA, margin 10",
        "TRA, margin ∞",
    ]
    assert name_of("tra, threshold -0.5, margin inf") == "TRA, threshold −0.5, margin ∞"
    assert name_of("tra-plain-distance, margin 2") == "TRA, plain distance, margin 2"
    assert name_of("of-tomorrow-inf") == "of-tomorrow-inf"


def test_order() -> None:
    others = ["tra-threshold-only", "rope", "of tomorrow"]
    assert table_order([*others[::-1], *VARIANTS[::-1], "rope"]) == [*VARIANTS, *others]


def test_colours_lines_and_patterns_tell_variants_apart() -> None:
    shown = [*VARIANTS[1:], "rope", "forgetting"]
    colours, lines, bars = colours_of(shown), line_styles(shown), bar_styles(shown)
    assert len(set(colours.values())) == len(shown)
    assert colours["tra"] == COLOURS["tra"]
    reds = [int(colours[variant][1:3], 16) for variant in VARIANTS[1:]]
    assert reds == sorted(reds)  # from blue to violet, by margin
    assert len({line["marker"] for line in lines.values()}) == len(shown)
    assert len({(str(line["linestyle"]), line["color"]) for line in lines.values()}) == len(shown)
    assert [lines[variant]["label"] for variant in shown] == [name_of(variant) for variant in shown]
    assert len({bars[variant]["hatch"] for variant in ("tra", "tra, margin 2", "rope", "forgetting")}) == 4


def test_variants_change_nothing_for_the_others() -> None:
    alone, beside = line_styles(NAMES), line_styles([*NAMES, "tra, margin 2"])
    assert {name: beside[name] for name in NAMES} == alone
    assert alone["tra"]["linestyle"] == line_styles(["tra, margin 2", "rope"])["tra, margin 2"]["linestyle"] == "-"


def test_panels_have_the_first_variant_of_tra_to_compare_with() -> None:
    shown = ["tra", "tra, margin 2", "rope", "cope", "alibi", "nope", "lstm"]
    assert split_into_panels(shown) == [shown[:4], ["tra", *shown[4:]]]
    assert split_into_panels([*shown[1:], "entmax"])[1] == ["tra, margin 2", "nope", "lstm", "entmax"]


def test_curves_and_their_runs() -> None:
    runs = [with_margin(run("tra", seed, 0.5), margin) for margin in (10.0, "inf", 2) for seed in (1, 0)]
    runs += [run("rope", 0, 0.5), run("tra", 0, 1.0)]  # without the settings, as former versions wrote
    curves = exact_curves(runs)
    assert list(curves) == ["tra", "tra, margin 2", "tra, margin 10", "tra, margin inf", "rope"]
    assert (curves["tra"].middle[0], curves["tra, margin 2"].middle[0]) == (1.0, 0.5)
    assert [found.seed for found in by_variant(runs)["tra, margin inf"]] == [0, 1]


def test_shares_of_keys_that_stay_and_that_count() -> None:
    plain = run("tra", 0, 1.0, [diagnosed(64, kept=[[0.25], [0.5]], counted=[[0.25], [0.5]])])
    margin = with_margin(run("tra", 0, 1.0, [diagnosed(64, kept=[[0.75], [1.0]], counted=[[0.5], [0.25]])]), 2.0)
    assert list(kept_curves([plain])) == ["kept"]
    found = kept_curves([plain, margin])
    assert list(found) == ["kept", "counted"]
    assert [curve.middle for curve in found["kept"]["tra, margin 2"]] == [[0.75], [1.0]]
    assert [curve.middle for curve in found["counted"]["tra, margin 2"]] == [[0.5], [0.25]]
    assert [curve.middle for curve in found["counted"]["tra"]] == [[0.25], [0.5]]


def test_figures_are_drawn(tmp_path: Path) -> None:
    grids = {"kept": [[0.5]], "counted": [[0.25]], "negative_mass": [[0.1]], "reach": [[3.0]]}
    runs = [with_margin(run("tra", 0, 1.0, [diagnosed(64, **grids)]), margin) for margin in (0.0, 2.0, "inf")]
    paths = write_figures(runs, tmp_path)
    heights = {path.name: Image.open(path).size[1] for path in paths}
    alone = {path.name: Image.open(path).size[1] for path in write_figures(runs[:1], tmp_path)}
    assert heights["kept.png"] == pytest.approx(2 * alone["kept.png"], rel=0.05)  # a second row of panels
    draw_exact_match({found.variant: found.evaluation[:2] for found in runs}, tmp_path / "bars.png")
    assert Image.open(tmp_path / "bars.png").size[0] > 300


def test_a_page_tells_margins_apart(tmp_path: Path) -> None:
    """A config of a former version stands beside new ones, as what it is: without a margin."""
    folders = []
    for number, margin in enumerate(MARGINS):
        folder = make_run(tmp_path / str(number), "tra", number == 1)
        folders.append(folder if margin is None else with_settings(folder, threshold=0.0, margin=margin))
    folders.append(with_settings(make_run(tmp_path / "low", "tra"), threshold=-1, margin=0))
    folders.append(make_run(tmp_path / "rope", "rope", fades=0.4))
    data, problems = page_data(folders[::-1], tmp_path / "page.html")
    assert not problems
    (section,) = data["sections"]
    names = ["TRA, threshold −1", "TRA", "TRA, margin 2", "TRA, margin 10", "TRA, margin ∞", "RoPE"]
    assert [group["label"] for group in section["groups"]] == names
    assert len({group["colour"] for group in section["groups"]}) == 6
    assert [group["variant"] for group in section["groups"]] == [0, 1, 2, 3, 4, 0]
    assert section["tables"][0]["rows"][1]["cells"][0]["value"] == 2  # both runs without a margin, of two seeds
    words = " ".join([paragraph["text"] + " ".join(paragraph["items"]) for paragraph in section["summary"]])
    assert "TRA, margin ∞ 1.000" in words
    assert "The runs differ" not in words


def test_summary_and_comparison_name_variants(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "runs" / str(number), "tra") for number in range(3)]
    for folder, margin in zip(folders[1:], ("inf", 2.0), strict=True):
        with_settings(folder, margin=margin)
    for folder in folders:
        rows = [
            json.loads(line) | {"precision": "float32"} for line in (folder / "eval.jsonl").read_text().splitlines()
        ]
        write_lines(folder / "eval.jsonl", [row | {"seed": 0} for row in rows])
        kept = {"kept": [[0.5]], "counted": [[0.5 if folder == folders[0] else 0.25]], "null": [[0.0]]}
        rows = [json.loads(line) | kept for line in (folder / "diagnose.jsonl").read_text().splitlines()]
        write_lines(folder / "diagnose.jsonl", rows)
    runs = read_runs(folders)
    readme, *_ = write_summary(runs, tmp_path / "out")
    assert "| split | length | sequences | tra | tra, margin inf | tra, margin 2 |" in readme.read_text()
    text = comparison_text(runs)
    assert "\n| TRA | 0.001 | 1.000 |" in text
    assert text.index("| TRA, margin 2 | 0.001") < text.index("| TRA, margin ∞ | 0.001")
    assert "Keys kept, keys that count as distance, null rows" in text
    assert "| TRA | kept 0.500, null 0.000 |" in text
    assert "| TRA, margin 2 | kept 0.500, counted 0.250, null 0.000 |" in text
    plain = comparison_text(runs[:1])
    assert "Keys kept, null rows" in plain
    with pytest.raises(ValueError, match="two runs of tra, margin 2 with seed 0: name one of them"):
        read_runs([folders[2], with_settings(make_run(tmp_path / "again", "tra"), margin=2)])


def test_language_models_are_compared_with_plain_tra(tmp_path: Path) -> None:
    folders = [make_text_run(tmp_path / str(number), "tra", grows=0.1) for number in range(3)]
    for folder, margin in zip(folders, ("inf", 0.0, 2.0), strict=True):
        with_settings(folder, margin=margin, block="pre", qk_norm=None)
        rows = [
            json.loads(line) | {"by_position": []} for line in (folder / "perplexity.jsonl").read_text().splitlines()
        ]
        write_lines(folder / "perplexity.jsonl", rows)
        grid = {name: [[0.5]] for name in ("kept", "null", "log_forget", "reach", "walked")}
        counted = {"counted": [[0.5 if margin == 0 else 0.125]]}
        row = {"split": "words/128", "shortest": 128, "longest": 128, **grid, **counted}
        write_lines(folder / "diagnose.jsonl", [row])
    text = language_text(read_runs(folders))
    assert text.index("| TRA, margin 2 | 20.1") < text.index("| TRA, margin ∞ | 20.1")
    ratios = text[text.index("## Perplexity over that of TRA\n") : text.index("## What TRA's heads do")]
    assert "| TRA, margin ∞ | 1.000 |" in ratios
    assert "| TRA |" not in ratios
    heads = text[text.index("## What TRA's heads do") : text.index("## The runs")]
    assert [line for line in heads.splitlines() if line.endswith(":") and line.startswith("TRA")] == [
        "TRA:",
        "TRA, margin 2:",
        "TRA, margin ∞:",
    ]
    assert heads.count("| counted | 0.12 | 0.12 … 0.12 |") == 2
    margins = language_text([read_run(folder) for folder in (folders[0], folders[2])])
    assert "above 1 TRA, margin 2 is better" in margins


@pytest.mark.parametrize("settings", [{"margin": "wide"}, {"margin": None}, {"threshold": "inf"}, {"margin": [2]}])
def test_damaged_settings_are_a_problem_of_the_run(settings: dict[str, Any], tmp_path: Path) -> None:
    folders = [with_settings(make_run(tmp_path / "a", "tra"), **settings), make_maps(make_run(tmp_path / "b", "tra"))]
    data, problems = page_data(folders, tmp_path / "page.html")
    (name,) = settings
    assert [(problem.run, problem.why) for problem in problems] == [
        (str(folders[0]), f"config.json is damaged: model.{name} is not a number")
    ]
    assert len(data["sections"][0]["groups"]) == 1


def test_a_page_has_the_share_of_counted_keys_where_there_is_a_margin(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "plain", "tra"), with_settings(make_run(tmp_path / "margin", "tra"), margin=2.0)]
    for folder, share in zip(folders, (0.5, 0.25), strict=True):
        rows = [json.loads(line) for line in (folder / "diagnose.jsonl").read_text().splitlines()]
        write_lines(folder / "diagnose.jsonl", [row | {"kept": [[0.5]], "counted": [[share]]} for row in rows])

    def measures(*shown: Path) -> dict[str, Any]:
        data, _ = page_data(shown, tmp_path / "page.html")
        (chart,) = (chart for chart in data["sections"][0]["charts"] if chart["kind"] == "failures")
        return {measure["name"]: measure["lines"] for measure in chart["measures"]}

    assert "counted" not in measures(folders[0])
    lines = measures(*folders)["counted"]
    assert {(line["group"], line["y"][0]) for line in lines} == {(0, 0.5), (1, 0.25)}
