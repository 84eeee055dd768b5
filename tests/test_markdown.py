"""The ticket's text: what the page says, as Markdown that a renderer cannot misread."""

import re
from html import unescape

import pytest
from markdown_it import MarkdownIt

from tests.results import HOSTILE, Result, every_case, hostile, result_of
from traceaudit.report import advice, rows
from traceaudit.report.markdown import escaped, to_markdown

OWN_TAGS = {"h2", "h3", "p", "ul", "ol", "li", "strong", "table", "thead", "tbody", "tr", "th", "td"}


def rendered(text: str) -> str:
    """Return the HTML that a renderer of GitHub's kind, with HTML allowed, makes of Markdown."""
    html: str = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    return html


@every_case
def test_ticket_has_only_its_own_markup(result: Result) -> None:
    """Names open no tag, link, image, code or heading; each table has cells in all columns."""
    page = rendered(to_markdown(result))
    assert set(re.findall(r"<([a-z0-9]+)", page)) <= OWN_TAGS
    for table in re.findall(r"<table>.*?</table>", page, re.DOTALL):
        counts = {len(re.findall(r"<t[hd]", row)) for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)}
        assert len(counts) == 1


@pytest.mark.parametrize(
    "name",
    [
        "a|b",
        "`code` and **bold** and _slanted_",
        "<img src=x onerror=alert(1)>",
        "[link](https://example.org) ![image](x)",
        "# no heading",
        "&lt; stays",
        "back\\slash\\|",
        "~~gone~~ $x$ @somebody #12",
        "void at::native::(anonymous namespace)::kernel<float, (bool)0>(int)",
    ],
)
def test_names_are_shown_as_they_are(name: str) -> None:
    """What is escaped reads, once rendered, as it was."""
    html = rendered(f"| a |\n|---|\n| {escaped(name)} |\n")
    assert re.findall(r"<td>(.*)</td>", html) == [
        name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    ]
    assert unescape(html).count(name) == 1


def test_addresses_become_no_links() -> None:
    """GitHub links bare addresses; those of a trace are broken up."""
    assert escaped("https://example.org and www.example.org") == r"https\://example.org and www\.example.org"


def test_ticket_tells_the_story() -> None:
    """Headline, factors, each row of the waterfall, findings with action and check, and the warnings are in it."""
    result = result_of()
    text = to_markdown(result)
    page = unescape(re.sub(r"<[^>]+>", "", rendered(text)))
    for row in rows.waterfall(result):
        assert re.search(rf"^\| (\*\*)?{row.title}(\*\*)? \| {100 * row.share:.1f} % \|", text, re.MULTILINE)
    for finding in advice.findings(result):
        for part in (finding.title, finding.action, finding.verify):
            assert part in page
    assert "rank5_trace.json.gz, stream 7, 1732000000123456789 to 1732000000143456789 ns" in page
    assert "warning rank 3: the file ends in the middle of an event" in page
    assert text == to_markdown(result)


def test_unreliable_result_says_so_first() -> None:
    """The sign stands before the headline."""
    assert "\n\n⚠ Attribution not reliable" in to_markdown(result_of(reliable=False))
    assert "⚠" not in to_markdown(result_of())


def test_hostile_names_are_in_the_ticket() -> None:
    """They are shown, not dropped."""
    assert HOSTILE[:36] in unescape(rendered(to_markdown(hostile())))
