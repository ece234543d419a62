"""The page in a real browser: drawn, usable by mouse and keyboard, silent, and safe with any text."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import browser  # noqa: F401 - a fixture
from tests.report.pages import HOSTILE, make_maps, make_run, make_text_run
from tra.report.names import NAMES
from tra.report.page import write_page

ACCENT = "rgb(0, 95, 150)"


@dataclass
class Opened:
    """A page, and what it said and asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    seconds: float = 0.0


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:  # noqa: F811
    """Opens a file; at the end nothing may have been said, and nothing asked of the network."""
    all_opened: list[Opened] = []

    def open_page(file: Path, width: int = 1400, **options: Any) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        one = Opened(context.new_page())
        all_opened.append(one)
        one.page.on("console", lambda message: one.said.append(message.text))
        one.page.on("pageerror", lambda error: one.said.append(str(error)))
        one.page.on("dialog", lambda dialog: (one.said.append(dialog.message), dialog.dismiss()))
        one.page.on("request", lambda request: one.asked.append(request.url))
        started = time.perf_counter()
        one.page.goto(file.as_uri())
        one.page.wait_for_selector("html[data-ready]", timeout=60_000)
        one.seconds = time.perf_counter() - started
        return one

    yield open_page
    for one in all_opened:
        assert one.said == []
        assert [url for url in one.asked if not url.startswith(("data:", "blob:"))] == one.asked[:1]
        assert one.asked[0].startswith("file:")
        one.page.context.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two mechanisms, two seeds each, and maps; a language model; a run that isn't there."""
    folder = tmp_path_factory.mktemp("page")
    runs = [make_run(folder / f"tra-{seed}", "tra", seed) for seed in (0, 1)]
    runs += [make_run(folder / f"rope-{seed}", "rope", seed, fades=0.4) for seed in (0, 1)]
    for run in (runs[0], runs[2]):
        make_maps(run)
    runs += [make_text_run(folder / "text", "forgetting", grows=0.2), folder / "missing"]
    write_page(runs, folder / "report.html")
    return folder / "report.html"


def visible(page: Any, kind: str) -> list[str]:
    """Names of the lines that are drawn in the first chart of a kind."""
    names: list[str] = page.evaluate(
        """kind => document.querySelector(`[data-kind=${kind}]`).data
            .filter(trace => trace.visible === true && trace.mode !== "markers" && trace.fill !== "toself")
            .map(trace => trace.name)""",
        kind,
    )
    return names


def tab_to(page: Any, selector: str) -> None:
    """With the Tab key alone."""
    for _ in range(100):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab never reaches {selector}")


def test_curves_are_drawn(opened: Any, file: Path) -> None:
    page = opened(file).page
    assert page.locator("section").count() == 2
    for kind, lines in (("length", 2), ("failures", 2), ("training", 2), ("perplexity", 1)):
        plot = page.locator(f"[data-kind={kind}]").first
        assert plot.locator(".scatterlayer .trace path.js-line").count() >= lines, kind
        assert len(visible(page, kind)) == lines
    y = page.evaluate("document.querySelector('[data-kind=length]').data.find(t => t.name === 'RoPE').y")
    assert y == pytest.approx([1.0, 0.5995, 0.1995])
    assert page.locator(".problems li").all_inner_texts() == [f"{file.parent / 'missing'} doesn't exist"]
    assert "Falls: RoPE, from 1.000 to 0.199 (0.199-0.200)" in page.locator(".summary").nth(1).inner_text()
    above = page.locator("section").first.locator(":scope > *").all()[:3]
    assert [part.evaluate("part => part.tagName") for part in above] == ["H2", "DIV", "H3"]
    assert above[1].inner_text().startswith("The task is flip-flop: remember the bit that was written last")


@pytest.mark.slow
def test_hover_tells_value_and_range(opened: Any, file: Path) -> None:
    page = opened(file).page
    plot = page.locator("[data-kind=length]")
    plot.scroll_into_view_if_needed()
    page.evaluate("Plotly.Fx.hover(document.querySelector('[data-kind=length]'), [{curveNumber: 4, pointNumber: 2}])")
    text = plot.locator(".hoverlayer").text_content()
    assert "RoPE" in text
    assert "16x, length 1,024" in text
    assert "0.199 (0.199-0.200)" in text
    assert "2 seeds" in text


@pytest.mark.slow
def test_a_mechanism_is_switched_off(opened: Any, file: Path) -> None:
    page = opened(file).page
    box = page.get_by_label("RoPE", exact=True)
    box.uncheck()
    for kind in ("length", "failures", "training"):
        assert visible(page, kind) == ["TRA"], kind
    page.locator("[data-kind=length] .legendtoggle").nth(1).click()  # Plotly's legend does the same
    page.wait_for_function("document.querySelectorAll('fieldset input')[1].checked")
    assert visible(page, "training") == ["TRA", "RoPE"]


@pytest.mark.slow
def test_a_head_is_chosen(opened: Any, file: Path) -> None:
    page = opened(file).page
    image = page.locator(".map .heatmaplayer image").first
    before = image.get_attribute("href") or image.get_attribute("xlink:href")
    assert page.evaluate("document.querySelector('.map').data[0].z[3][3]") == 1
    page.get_by_label("Head").first.select_option("1")
    after = image.get_attribute("href") or image.get_attribute("xlink:href")
    assert before.startswith("data:image/png")
    assert before != after
    assert page.evaluate("document.querySelector('.map').data[0].z[3][3]") == pytest.approx(45 / 63)
    assert "▸" in page.locator("figcaption", has_text="answer is due").first.inner_text()
    assert page.locator(".map .ytick text", has_text="∅").count() == 2  # the null row, in both panels


@pytest.mark.slow
def test_pointing_at_a_cell_tells_score_distance_and_weight(opened: Any, file: Path) -> None:
    page = opened(file).page
    plot = page.locator(".map").first
    plot.scroll_into_view_if_needed()
    box = plot.locator(".heatmaplayer image").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 3.5 / 12, box["y"] + box["height"] * 6.5 / 12)
    page.mouse.move(box["x"] + box["width"] * 3.6 / 12, box["y"] + box["height"] * 6.6 / 12)
    page.locator(".readout", has_text="query 6").wait_for()
    for text in (plot.locator(".hoverlayer").text_content(), page.locator(".readout").first.inner_text()):
        assert "query 6 “i”, key 3 “0”" in text
        assert "score 1.50" in text
        assert "distance 4" in text
        assert "weight 0.004" in text


def test_keys_that_stay_without_counting_have_a_frame(opened: Any, tmp_path: Path) -> None:
    margin = make_maps(make_run(tmp_path / "margin", "tra"), has_margin=True)
    plain = make_maps(make_run(tmp_path / "plain", "tra", seed=1))
    write_page([margin, plain], tmp_path / "report.html")
    page = opened(tmp_path / "report.html").page
    plot = page.locator(".map").first
    assert plot.locator(".scatterlayer .point").count() == 11
    assert page.evaluate("document.querySelector('.map').data[1].x.every((x) => x === 0)")
    assert "□ stays in the softmax without counting" in page.locator("figcaption", has_text="□").first.inner_text()
    plot.focus()
    page.keyboard.press("ArrowUp")
    assert "distance 11, doesn't count itself" in page.locator(".readout").first.inner_text()
    page.get_by_label("Run").first.select_option("1")
    assert plot.locator(".scatterlayer .point").count() == 0
    assert "□" not in page.locator("figcaption").nth(-1).inner_text()
    page.locator(".map").first.focus()
    page.keyboard.press("ArrowUp")
    assert "itself" not in page.locator(".readout").first.inner_text()


@pytest.mark.slow
def test_a_table_is_sorted(opened: Any, file: Path) -> None:
    page = opened(file).page
    table = page.locator("table").first
    names = table.locator("tbody th")
    button = table.get_by_role("button", name="16x (1,024)")
    assert names.all_inner_texts() == ["TRA", "RoPE"]
    button.click()
    assert names.all_inner_texts() == ["TRA", "RoPE"]
    button.click()
    assert names.all_inner_texts() == ["RoPE", "TRA"]
    assert table.locator("[aria-sort=ascending]").inner_text() == "16x (1,024)"


def test_the_keyboard_is_enough(opened: Any, file: Path) -> None:
    page = opened(file).page
    tab_to(page, "#theme")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineColor") == ACCENT
    tab_to(page, "fieldset input")
    page.keyboard.press("Space")
    assert visible(page, "length") == ["RoPE"]
    tab_to(page, "figure select")
    page.keyboard.press("ArrowDown")
    page.wait_for_function(
        "document.querySelector('[data-kind=failures]').previousSibling.querySelector('select').value === '1'"
    )
    tab_to(page, "thead button")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.locator("table").first.locator("tbody th").all_inner_texts() == ["TRA", "RoPE"]
    tab_to(page, ".map")
    before = page.locator(".readout").first.inner_text()
    assert "query 11" in before
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert "query 10 “i”, key 1 “1”" in page.locator(".readout").first.inner_text()
    tab_to(page, "summary")
    page.keyboard.press("Enter")
    assert page.locator("details[open]").count() == 1


@pytest.mark.slow
def test_dark_is_asked_for_or_toggled(opened: Any, file: Path) -> None:
    def ground(page: Any) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour))

    light, dark = opened(file).page, opened(file, color_scheme="dark").page
    assert ground(dark) < 150 < 600 < ground(light)
    light.get_by_role("button", name="Dark").click()
    assert ground(light) == ground(dark)
    font = "document.querySelector('[data-kind=length]').layout.font.color"
    assert light.evaluate(font) == dark.evaluate(font) == "#e7e8ea"


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_is_wider_than_the_screen(opened: Any, file: Path, width: int, tmp_path: Path) -> None:
    page = opened(file, width=width).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for plot in page.locator(".plot").all():
        box = plot.locator(".main-svg").first.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    page.screenshot(path=tmp_path / f"page-{width}.png", full_page=True)
    assert (tmp_path / f"page-{width}.png").stat().st_size > 20_000


def test_on_a_phone_every_key_has_its_label_and_a_telling_head_is_shown(opened: Any, tmp_path: Path) -> None:
    run = make_maps(make_run(tmp_path / "run", "tra"), size=64)
    with np.load(run / "attend.npz") as stored:
        arrays = dict(stored)
    arrays["weights"][1, 0, 4, 2] = 60
    np.savez_compressed(run / "attend.npz", **arrays)
    write_page([run], tmp_path / "report.html")
    page = opened(tmp_path / "report.html", width=390).page
    plot = page.locator(".map").first
    for axis in ("xaxis", "yaxis"):
        assert plot.evaluate(f"plot => plot.layout.{axis}.tickvals.length") == 64
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    chosen = [select.evaluate("select => select.value") for select in page.locator(".chooser select").all()[-3:]]
    assert chosen == ["0", "1", "0"]  # run, layer, head


@pytest.mark.slow
def test_it_prints_narrow_and_light(opened: Any, file: Path, tmp_path: Path) -> None:
    page = opened(file, color_scheme="dark").page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.locator("[data-kind=length] .main-svg").first.bounding_box()["width"] <= 704
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_hostile_text_is_text(opened: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run {number}", text) for number, text in enumerate(HOSTILE)]
    make_maps(runs[0], symbols=HOSTILE)
    write_page([*runs, tmp_path / HOSTILE[0].replace("/", "∕")], tmp_path / "report.html")
    page = opened(tmp_path / "report.html", width=360).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("main script, main img").count() == 0
    texts = page.locator("tbody th").all_text_contents()
    assert {text for text in HOSTILE if len(text) < 60} <= set(texts)
    configs = "".join(page.locator("pre").all_text_contents())
    assert HOSTILE[-1] in configs
    for number, start in ((0, HOSTILE[0]), (2, HOSTILE[2][:30])):  # Plotly knows some tags and entities itself
        point = f"{{curveNumber: {2 * number}, pointNumber: 1}}"
        page.wait_for_timeout(200)  # Plotly hovers at most every 50 ms
        page.evaluate(f"Plotly.Fx.hover(document.querySelector('[data-kind=length]'), [{point}])")
        assert start in page.locator("[data-kind=length] .hoverlayer").text_content()
    ticks = "".join(page.locator(".map .xtick text").all_text_contents())
    assert "<script>" in ticks


def test_scripts_that_are_not_the_page_are_refused(opened: Any, file: Path) -> None:
    one = opened(file)
    one.page.evaluate(
        """() => { const script = document.createElement("script"); script.textContent = "window.ran = true";
            document.body.append(script); }"""
    )
    assert one.page.evaluate("window.ran") is None
    assert any("Content Security Policy" in text for text in one.said)
    one.said.clear()


@pytest.mark.timing
def test_sixty_runs_open_in_three_seconds(opened: Any, tmp_path: Path) -> None:
    mechanisms = list(NAMES)[:15]
    runs = [
        make_run(tmp_path / f"{m}-{seed}", m, seed, fades=0.05 * n, steps=200)
        for n, m in enumerate(mechanisms)
        for seed in range(4)
    ]
    for run in runs[:2]:
        make_maps(run, layers=4, heads=4, size=96)
    write_page(runs, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 15e6
    seconds = [opened(tmp_path / "report.html").seconds for _ in range(3)]
    assert min(seconds) < 3, seconds
