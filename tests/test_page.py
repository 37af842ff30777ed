"""The web page of result files: what it holds, and what a browser makes of it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner, Result
from playwright.sync_api import Browser, Page, sync_playwright
from tests.trace_lab import trace_line, write_lines, write_tokenizer

from agentspec.benchmarks.__main__ import main
from agentspec.benchmarks.engine_bench import STORED_RESULT
from agentspec.benchmarks.page.charts import BarPanel, Panel, Series, draw_bars, draw_lines

ColorScheme = Literal["light", "dark"]

BUILD = Path(__file__).resolve().parent.parent / "build"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def replayed(folder: Path) -> Path:
    """A real replay: two workloads, two batch sizes, an ablation and a peer."""
    text = "Thought: look it up.\n```python\nprint(1)\n```\nAction: search[<b>]\n" * 3
    for name in ("qa", "code"):
        lines = [trace_line(f"{name}-{run}", 0, text, workload=name) for run in range(6)]
        write_lines(folder / f"{name}.jsonl", lines)
    tokenizer = write_tokenizer(folder / "tokenizer.json")
    path = folder / "replay.json"
    arguments = ["replay", "--tokenizer", str(tokenizer), "--json", str(path), "--draft-us", "5"]
    arguments += ["--eval", str(folder / "qa.jsonl"), "--eval", str(folder / "code.jsonl")]
    for batch_size in (1, 2):
        arguments += ["--batch-size", str(batch_size)]
    for method in ("agentspec", "agentspec:no-own", "ngram"):
        arguments += ["--method", method]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    return path


def report(*paths: Path, output: Path) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, paths), "-o", str(output)])


@pytest.fixture(scope="module")
def page_path(folder: Path, replayed: Path) -> Path:
    path = folder / "report.html"
    done = report(replayed, STORED_RESULT, output=path)
    assert done.exit_code == 0, done.output
    return path


def sections(html: str) -> dict[str, str]:
    return dict(re.findall(r'<section class="(\w+)">(.*?)</section>', html, re.DOTALL))


def test_page_needs_no_other_file(page_path: Path) -> None:
    html = page_path.read_text()

    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', html) == []
    assert re.findall(r"url\((?!#)[^)]*\)|@import", html) == []
    assert "<script" not in html


def test_modelled_and_measured_figures_share_no_table(page_path: Path) -> None:
    found = sections(page_path.read_text())

    assert set(found) == {"measured", "modelled"}
    for kind, section in found.items():
        captions = re.findall(r"<caption>(\w+)", section)
        assert captions
        assert {kind.title()} == set(captions)


def test_every_figure_says_its_conditions(page_path: Path, replayed: Path) -> None:
    html = page_path.read_text()
    commit = json.loads(replayed.read_text())["meta"]["commit"]

    captions = re.findall(r"<figcaption>(.*?)</figcaption>", html, re.DOTALL)

    assert len(re.findall(r"<figure>", html)) == len(captions)
    assert all("commit " in caption for caption in captions)
    assert any(commit in caption and "curve h200" in caption for caption in captions)


def test_replay_is_drawn_by_batch_size_block_budget_cost_and_part(page_path: Path) -> None:
    titles = re.findall(r"<h4>(.*?)</h4>", sections(page_path.read_text())["modelled"])

    assert [
        "Speed-up by batch size",
        "Rejected share of the draft tokens by block (agentspec)",
        "Budget use",
        "Step time and the chosen points",
        "Change of the speed-up against agentspec, part by part and policy by policy",
    ] == titles


def test_table_shows_the_figures_of_the_file(page_path: Path, replayed: Path) -> None:
    cell: dict[str, Any] = json.loads(replayed.read_text())["cells"][0]
    table = sections(page_path.read_text())["modelled"].split("<table>")[1]

    assert f'<td class="number">{cell["modelled_speedup"]:.3f}</td>' in table
    assert f'<td class="number">{cell["num_tokens"]}</td>' in table


def test_equal_files_make_equal_pages(folder: Path, replayed: Path, page_path: Path) -> None:
    again = folder / "again.html"
    report(replayed, STORED_RESULT, output=again)

    assert page_path.read_text() == again.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "no result of agentspec-bench"),
        ("[]", "no result of agentspec-bench"),
        ('{"meta": {"command": "dance"}}', "a result of 'dance'; expected one of serve, engine, replay"),
        ('{"meta": {"command": "replay"}}', "without field 'cells'"),
    ],
)
def test_file_that_is_no_result_is_refused_by_name(folder: Path, text: str, message: str) -> None:
    path = folder / "bad.json"
    path.write_text(text)

    done = report(path, output=folder / "bad.html")

    assert done.exit_code == 1
    assert f"{path}: " in done.output
    assert message in done.output
    assert not (folder / "bad.html").exists()


def test_text_of_a_file_is_no_markup(folder: Path, replayed: Path) -> None:
    record = json.loads(replayed.read_text())
    for cell in [*record["cells"], *record["breakdown"]]:
        cell["workload"] = "<script>alert(1)</script>"
    path = folder / "markup.json"
    path.write_text(json.dumps(record))

    report(path, output=folder / "markup.html")

    assert "<script>" not in (folder / "markup.html").read_text()


def test_drawings_of_one_page_share_no_id() -> None:
    one = draw_lines([Panel("a", (Series("m", [1, 8], [1.0, 2.0]),))], x_label="x", y_label="y", reference=1.0)
    other = draw_lines([Panel("a", (Series("m", [1, 8], [1.0, 3.0]),))], x_label="x", y_label="y", reference=1.0)

    assert set(re.findall(r'id="([^"]+)"', one)).isdisjoint(re.findall(r'id="([^"]+)"', other))


def test_one_speed_up_is_marked_by_a_line() -> None:
    panel = Panel("a", (Series("m", [1, 8], [1.5, 2.0], [1.4, 1.9], [1.6, 2.1]),))

    assert 'class="reference"' in draw_lines([panel], x_label="x", y_label="y", reference=1.0)
    assert 'class="reference"' not in draw_lines([panel], x_label="x", y_label="y")


def test_bars_carry_their_values() -> None:
    svg = draw_bars([BarPanel("a", ("code", "text"), (0.25, 0.5))], x_label="share")

    assert [">0.25<" in svg, ">0.50<" in svg, ">code<" in svg] == [True, True, True]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real headless Chromium; missing, that is a failure in CI."""
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is not installed: .ci/setup gets it from Debian's packages")
        pytest.skip("Chromium is not installed")
    with sync_playwright() as driver:
        # No sandbox: it needs user namespaces, which containers run by root do not have; the page is our own.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser: Browser, path: Path, scheme: ColorScheme, width: int = 1280) -> tuple[Page, list[str]]:
    """The page, and what it logged or asked for besides itself."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda request: noise.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    return page, noise


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_shows_every_figure(browser: Browser, page_path: Path, scheme: ColorScheme) -> None:
    page, noise = open_page(browser, page_path, scheme)
    BUILD.mkdir(exist_ok=True)
    page.screenshot(path=BUILD / f"report-{scheme}.png", full_page=True)
    boxes = [figure.bounding_box() for figure in page.query_selector_all("figure svg")]
    ink = page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.close()

    assert noise == []
    assert len(boxes) == 6
    assert all(box is not None and box["width"] > 300 and box["height"] > 100 for box in boxes)
    assert contrast(ink, paper) > 4.5


def contrast(one: str, other: str) -> float:
    """Contrast of two CSS colours as WCAG defines it."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_light_and_dark_differ(browser: Browser, page_path: Path) -> None:
    colours = []
    schemes: tuple[ColorScheme, ...] = ("light", "dark")
    for scheme in schemes:
        page, _ = open_page(browser, page_path, scheme)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.close()

    assert _luminance(colours[0]) > 0.9
    assert _luminance(colours[1]) < 0.1


def test_page_fits_a_phone(browser: Browser, page_path: Path) -> None:
    page, _ = open_page(browser, page_path, "light", width=390)
    width = page.evaluate("document.documentElement.scrollWidth")
    page.close()

    assert width == 390
