"""The page in a real browser: it loads alone, fetches nothing and complains of nothing."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_report import Result, hostile, result_of
from traceaudit.report.html import to_html

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("result", [result_of(), result_of(80, mfu=False), hostile()], ids=["usual", "many", "hostile"])
def test_page_loads_alone(browser: Any, tmp_path: Path, result: Result, scheme: str) -> None:  # noqa: ANN401
    """One request, for the file itself; no message on the console; no overflow on a phone; the result inside."""
    file = tmp_path / "report.html"
    file.write_text(to_html(result), encoding="utf-8")
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 390, "height": 800})
    page = context.new_page()
    requests: list[str] = []
    messages: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("dialog", lambda dialog: messages.append(dialog.message))
    page.goto(file.as_uri())
    page.wait_for_load_state("networkidle")

    assert [url for url in requests if not url.startswith("data:")] == [file.as_uri()]
    assert messages == []
    assert page.locator("h1").count() == page.locator("main").count() == 1
    assert json.loads(page.locator("#traceaudit-result").text_content()) == result
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0 && image.alt)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


def _unavailable(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI must run this test")
    pytest.skip(reason)
