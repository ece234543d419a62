"""The site: it builds with warnings as errors, and works in a browser that has no network."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.browser import browser  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PARTS = ("sphinx", "myst_parser", "pydata_sphinx_theme")
NO_NETWORK = "import socket; socket.getaddrinfo = socket.create_connection = None"
WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does, without a network."""
    missing = [name for name in PARTS if importlib.util.find_spec(name) is None]
    if missing and "CI" not in os.environ:
        pytest.skip(f"building the site needs {', '.join(missing)} (pip install '.[docs]')")
    out = tmp_path_factory.mktemp("site")
    arguments = [
        "--fresh-env",
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "-b",
        "html",
        str(ROOT / "docs"),
        str(out),
    ]
    code = f"{NO_NETWORK}; import sys; from sphinx.cmd.build import main; sys.exit(main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:  # noqa: F811
    """Opens an address; at the end there may be no error or warning, and no request to another host."""
    said: list[str] = []
    asked: list[tuple[str, str]] = []
    contexts = []

    def opened(url: str, width: int = 1280, **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: message.type in ("error", "warning") and said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append((url, request.url)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    for url, request in asked:
        assert request.startswith(("data:", "blob:", "/".join(url.split("/")[:3]))), request


def test_every_page_is_there(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), page


def test_reports_and_docstrings_are_shown(site: Path) -> None:
    assert "Sequences without an error, of all test sequences" in (site / "results/demo.html").read_text()
    operator = (site / "api/operator.html").read_text()
    assert "threshold_relative_attention" in operator
    assert "A promise that no absolute scaled score exceeds it" in operator


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["index", "mechanism", "compared-with", "results/speed", "api/operator", "tasks"])
def test_pages_fit_the_screen(open_page: Any, address: str, name: str, width: int) -> None:
    page = open_page(f"{address}/{name}.html", width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    broken = "[...document.images].filter((image) => image.complete && !image.naturalWidth).map((image) => image.src)"
    assert page.evaluate(broken) == []


@pytest.mark.parametrize("as_files", [False, True])
def test_search_finds(open_page: Any, address: str, site: Path, as_files: bool) -> None:
    page = open_page(f"{site.as_uri() if as_files else address}/search.html?q=margin")
    page.wait_for_selector("#search-results li a")
    found = page.locator("#search-results li a").all_inner_texts()
    assert any("What we changed" in title for title in found), found


def states(page: Any) -> list[tuple[str, str, float]]:
    """Return state, distance and weight of every key of the figure, oldest first."""
    found: list[tuple[str, str, float]] = page.evaluate(
        """() => {
            const numbers = [...document.querySelectorAll(".tra-number")].map((text) => text.textContent);
            return [...document.querySelectorAll(".tra-key")].map((bar, place) =>
                [bar.classList[1], numbers[place], Number(bar.dataset.weight)]);
        }"""
    )
    return found


def test_the_figure_computes_the_definition(open_page: Any, address: str) -> None:
    """Compared with the operator's reference, at a margin, on the figure's scores."""
    torch = pytest.importorskip("torch")
    from tra.ops import attention_map

    page = open_page(f"{address}/mechanism.html")
    page.locator("#tra-margin").fill("1")
    page.locator("#tra-gate").fill("-0.3")
    scores = [1.6, -0.7, 0.4, -1.6, 2.2, -0.4, -2.3, 0.9, -1.2, 1.3]
    query, key = torch.ones(1, 1, 1, 1).double(), torch.tensor(scores).double().view(1, 1, -1, 1)
    expected = attention_map(query, key, torch.full((1, 1, 1), -0.3).double(), scale=1.0, margin=1.0)
    for place, (state, distance, weight) in enumerate(states(page)):
        kept, counted = bool(expected.kept[0, 0, 0, place]), bool(expected.counted[0, 0, 0, place])
        assert state == ("tra-counts" if counted else "tra-stays" if kept else "tra-leaves")
        assert distance == (str(int(expected.distances[0, 0, 0, place])) if kept else "–")
        assert weight == pytest.approx(expected.weights[0, 0, 0, place].item(), abs=1e-6)


def test_the_figure_is_dragged(open_page: Any, address: str) -> None:
    page = open_page(f"{address}/mechanism.html")
    circle = page.locator(".tra-threshold circle")
    circle.scroll_into_view_if_needed()
    before, box = states(page), circle.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x, y - 60, steps=4)
    page.mouse.up()
    assert float(page.locator("#tra-threshold").input_value()) > 1
    assert sum(state == "tra-counts" for state, *_ in states(page)) < sum(s == "tra-counts" for s, *_ in before)
    cut = page.locator(".tra-cut circle").bounding_box()
    page.mouse.move(cut["x"] + 5, cut["y"] + cut["height"] / 2)
    page.mouse.down()
    page.mouse.move(cut["x"] + 5, cut["y"] + 120, steps=4)
    page.mouse.up()
    assert float(page.locator("#tra-margin").input_value()) > 1
    assert any(state == "tra-stays" for state, *_ in states(page))


def test_the_figure_is_worked_by_keyboard(open_page: Any, address: str) -> None:
    page = open_page(f"{address}/mechanism.html", 390)
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.tra-threshold')"):
            break
    else:
        pytest.fail("Tab never reaches the threshold")
    for _ in range(3):
        page.keyboard.press("PageUp")
    slider = page.locator(".tra-threshold")
    assert slider.get_attribute("aria-valuenow") == "3.0"
    assert "a null row. Its output is 0" in page.locator("#tra-summary").inner_text()
    page.keyboard.press("ArrowDown")
    assert slider.get_attribute("aria-valuenow") == "2.9"


def test_noise_costs_nothing_until_the_margin_holds_it(open_page: Any, address: str) -> None:
    page = open_page(f"{address}/mechanism.html")
    before = [key for key in states(page) if key[0] != "tra-leaves"]
    page.get_by_role("button", name="Add noise").click()
    after = states(page)
    assert len(after) == 16
    assert [key for key in after if key[0] != "tra-leaves"] == before
    page.locator("#tra-margin").fill("4")
    named = page.evaluate("[...document.querySelectorAll('.tra-swatch')].map((swatch) => swatch.classList[1])")
    assert named == ["tra-counts", "tra-stays", "tra-leaves"]  # the caption says what colours mean
    counted = [key for key in states(page) if key[0] == "tra-counts"]
    assert [distance for _, distance, _ in counted] == [distance for _, distance, _ in before]
    assert sum(weight for *_, weight in counted) < 0.99
    page.get_by_role("button", name="Start again").click()
    assert len(states(page)) == 10


def test_it_is_dark_where_that_is_asked_for(open_page: Any, address: str) -> None:
    page = open_page(f"{address}/mechanism.html", color_scheme="dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    text = page.evaluate("getComputedStyle(document.querySelector('.tra-figure text')).fill")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    text, ground = (sum(int(part) for part in re.findall(r"\d+", colour)) for colour in (text, ground))
    assert ground < 150 < 450 < text
