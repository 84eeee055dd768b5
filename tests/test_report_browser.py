"""The page in a real browser: it loads alone, runs nothing of a trace, and anyone can read it."""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.results import HOSTILE, Result, hostile, result_of
from traceaudit.report import advice
from traceaudit.report.html import to_html

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PHONE, DESK = {"width": 390, "height": 800}, {"width": 1440, "height": 900}
Open = Callable[..., Any]  # what playwright returns has no types here


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a chromium; where there is none the tests are skipped, but in CI they fail."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _unavailable("playwright is not installed")
    if chromium is None:
        _unavailable("chromium is not installed")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Open:  # noqa: ANN401
    """Return what opens the page of a result and fails if it asks for anything or complains of anything."""

    @contextmanager
    def open_page(result: Result, *, viewport: dict[str, int] = DESK, **options: object) -> Iterator[Any]:
        file = tmp_path / "report.html"
        file.write_text(to_html(result), encoding="utf-8")
        context = browser.new_context(offline=True, viewport=viewport, **options)
        page = context.new_page()
        requests: list[str] = []
        messages: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: messages.append(dialog.message))
        page.goto(file.as_uri())
        page.wait_for_load_state("networkidle")
        yield page
        assert [url for url in requests if not url.startswith("data:")] == [file.as_uri()]
        assert messages == []
        context.close()

    return open_page


RESULTS = {"usual": result_of(), "many": result_of(80, mfu=False), "hostile": hostile()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())
def test_page_loads_alone(opened: Open, result: Result, scheme: str) -> None:
    """One request, for the file itself; no message on the console; no overflow on a phone; the result inside."""
    with opened(result, viewport=PHONE, color_scheme=scheme) as page:
        assert page.locator("h1").count() == page.locator("main").count() == 1
        assert json.loads(page.locator("#traceaudit-result").text_content()) == result
        assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0 && image.hasAttribute('alt'))")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())
def test_page_has_no_serious_barrier(opened: Open, result: Result, scheme: str) -> None:
    """With every part opened, axe-core finds nothing serious or critical."""
    axe = _axe()
    with opened(result, color_scheme=scheme) as page:
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        page.evaluate(axe)  # in the page's world, past its policy
        violations = page.evaluate("axe.run().then(outcome => outcome.violations)")
    serious = [
        (violation["id"], node["html"][:200])
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"][:3]
    ]
    assert serious == []


def test_names_stay_text(opened: Open) -> None:
    """What tries to be markup is shown as the text it is, and made no element."""
    with opened(hostile()) as page:
        shown = page.locator("main").text_content()
        assert HOSTILE[:36] in shown
        assert page.locator("img[src='x'], [onerror]").count() == 0


@pytest.mark.parametrize("mfu", [True, False])
def test_sums_of_the_page_are_those_of_the_result(opened: Open, mfu: bool) -> None:
    """Added up from its cells, the page has the nanoseconds of result.json."""
    result = result_of(mfu=mfu)
    with opened(result) as page:
        cells = page.evaluate(
            """[...document.querySelectorAll("#numbers tbody tr")].map(row =>
            [row.cells[0].textContent, row.cells[1].textContent, row.cells[4].dataset.key])"""
        )
    whole = {row: int(ns) for row, leaf, ns in cells if leaf == "all of it"}
    expected = [ns for ns in result["job"]["buckets"].values() if ns]
    assert sorted(whole.values()) == sorted([result["job"]["window_ns"], *expected])
    leaves = sum(int(ns) for _, leaf, ns in cells if leaf != "all of it")
    assert leaves == sum(
        entry["ns"] for entry in result["job"]["leaves"] if entry["leaf"] not in ("model_flops", "not_split")
    )


def test_keyboard_reaches_every_finding(opened: Open) -> None:
    """Tab stops at each finding, and Enter closes and opens it."""
    anchors = {row.anchor for row in advice.findings(result_of())}
    with opened(result_of()) as page:
        reached = set()
        for _ in range(400):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.closest('details.finding')?.id"))
            if reached >= anchors:
                break
        assert reached >= anchors
        page.locator("details.finding summary").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("details.finding").first.get_attribute("open") is None


def test_link_opens_the_finding_it_leads_to(opened: Open) -> None:
    """A closed finding opens when its link is followed."""
    with opened(result_of()) as page:
        last = page.locator("details.finding").last
        assert last.get_attribute("open") is None
        page.evaluate("id => { location.hash = id }", last.get_attribute("id"))
        page.wait_for_function("[...document.querySelectorAll('details.finding')].at(-1).open")


def test_tables_sort_and_filter(opened: Open) -> None:
    """A number column sorts largest first, then smallest first; a filter keeps the rows that have all its words."""
    with opened(result_of(20)) as page:
        table = page.locator("#ranks table")
        head = table.locator("th", has_text="achieved").locator("button")
        for expected in (["0", "19"], ["19", "0"]):
            head.click()
            ranks = table.locator("tbody th").all_text_contents()
            assert [ranks[0], ranks[-1]] == expected
        page.locator("#ranks input").fill("rank17 node02")
        assert table.locator("tbody tr:visible").count() == 1
        assert page.locator("#ranks output").text_content() == "1 of 20"


def test_page_is_complete_without_scripts(opened: Open) -> None:
    """All tables and figures are there; leaves open as details do; nothing that needs a script is shown."""
    with opened(result_of(), java_script_enabled=False) as page:
        assert page.locator("table").count() >= 10
        assert page.locator("button:visible, input:visible").count() == 0
        leaves = page.locator("details.bar-row ul").first
        assert not leaves.is_visible()
        page.locator("details.bar-row summary").first.click()
        assert leaves.is_visible()


def test_what_is_folded_prints(opened: Open) -> None:
    """On paper every leaf, every finding and all definitions are there, and no control is."""
    with opened(result_of(), java_script_enabled=False) as page:
        shown = "found => found.map(each => each.checkVisibility())"
        for selector in ("details.bar-row li", "details.finding .body", "#definitions dd"):
            page.emulate_media(media="screen")
            assert False in page.locator(selector).evaluate_all(shown)
            page.emulate_media(media="print")
            assert set(page.locator(selector).evaluate_all(shown)) == {True}, selector
        assert page.locator("nav:visible").count() == 0


def test_first_screen_says_it_all(opened: Open) -> None:
    """Headline, badge, waterfall and the three largest findings are seen on 1440 x 900 without scrolling."""
    with opened(result_of()) as page:
        for selector in ("h1", ".title .badge", "#waterfall", ".first li:nth-child(3)"):
            box = page.locator(selector).first.bounding_box()
            assert box["y"] + box["height"] <= DESK["height"], selector


def _axe() -> str:
    found = importlib.util.find_spec("axe_playwright_python")
    folders = found.submodule_search_locations if found is not None else None
    if not folders:
        _unavailable("axe-playwright-python is not installed")
    return (Path(folders[0]) / "axe.min.js").read_text(encoding="utf-8")


def _unavailable(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI must run this test")
    pytest.skip(reason)
